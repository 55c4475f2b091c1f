"""The chain of engines: encode, prefill, decode one token. Plain functions over engines and tensors.

The baseline and every budget run the same weight engines; a plan only adds its weightless engines in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.plans import Plan
from sinkprune.runtime.backends import Backend, Engine, Tensor
from sinkprune.runtime.backends.compatibility import BuiltEngines
from sinkprune.runtime.rotary import Positions, Rotary
from sinkprune.runtime.stopwatch import Stopwatch

Array = np.ndarray[Any, Any]


@dataclass
class KVCache:
    """The caches of every decoder segment, each at its own length."""

    past: list[dict[str, Tensor]]
    """For each segment its `past_key_i` and `past_value_i` [1,Hkv,P,h]."""
    lengths: list[int]
    """P of each segment."""
    next_positions: list[int]
    """The position id the next token has in each segment; they differ where positions are compact."""


@dataclass(frozen=True)
class Encoded:
    """An image as the LLM receives it."""

    embeddings: Array
    """[V,d]: the groups' kept tokens, one group behind the other."""
    kept_index: Array
    """[G,n0] source token of each row; frames that were sanitised as one are one group here."""
    norms: Array
    """[G,N] fp32."""
    salience: Array
    """[G,N] fp32."""


@dataclass(frozen=True)
class Images:
    """The images of a prompt."""

    group: Array
    """[V] int64: the number of the image each visual row is of, ascending."""
    stages: Sequence[tuple[int, ...]]
    """For each image, the K_s rows of it that survive each stage; nothing where no plan prunes."""


@dataclass
class Prefill:
    """What a prefill leaves behind."""

    logits: Tensor
    cache: KVCache
    tokens_per_layer: list[int] = field(default_factory=list)
    """The sequence length each layer ran on."""
    keep_index: dict[int, Tensor] = field(default_factory=dict)
    """After each pruning layer: the rows that survived it, among those it was given."""


class Chain:
    """The loaded engines of a bundle."""

    def __init__(
        self, bundle: Bundle, backend: Backend, dtype: np.dtype[Any], built: BuiltEngines | None = None
    ) -> None:
        """Loads the bundle's graphs, or the engines that were built from them."""
        self.backend, self.dtype = backend, dtype
        self._path = bundle.graph_path if built is None else built.path
        self.model = model = bundle.manifest.language_model
        self.segments = bundle.manifest.segments
        self.several_images = bundle.manifest.max_images > 1
        self.rotary = Rotary(model.rope_theta, model.head_dim, dtype, model.rope_sections)
        self.no_past = backend.tensor(np.zeros((1, model.num_kv_heads, 0, model.head_dim), dtype))
        self._plan_engines: dict[str, Engine] = {}
        self.vision = self._load("vision")
        projector = bundle.manifest.projector
        self.projector = self._load(projector) if projector else None
        self.decoders = [self._load(f"decoder_{segment}") for segment in range(len(self.segments))]
        self.head = self._load("head")

    def plan_engine(self, graph: str) -> Engine:
        """A weightless engine of a plan, loaded when first used."""
        if graph not in self._plan_engines:
            self._plan_engines[graph] = self._load(graph)
        return self._plan_engines[graph]

    def _load(self, graph: str) -> Engine:
        return self.backend.load(self._path(graph))


def encode(chain: Chain, plan: Plan | None, inputs: Mapping[str, Array], clock: Stopwatch) -> Encoded:
    """Image features to LLM embeddings: vision, the plan's sanitizer, the projector where there is one."""
    backend = chain.backend
    with clock.measure("vision"):
        features = chain.vision({name: backend.tensor(array) for name, array in inputs.items()})
    tokens, norms, salience = features["tokens"], features["norms"], features["salience"]
    kept_index = None
    if plan is not None and plan.sanitizer is not None:
        sanitizer = chain.plan_engine(plan.sanitizer)
        with clock.measure("sanitizer"):
            sanitized = sanitizer({"tokens": tokens, "norms": norms, "salience": salience})
        tokens, kept_index = sanitized["kept_tokens"], backend.numpy(sanitized["kept_index"])
    if chain.projector is not None:
        with clock.measure("projector"):
            tokens = chain.projector({"tokens": tokens})["embeddings"]
    embeddings = backend.numpy(tokens)
    norms, salience = backend.numpy(norms), backend.numpy(salience)
    if kept_index is None:
        kept_index = np.broadcast_to(np.arange(norms.shape[1]), norms.shape)
    return Encoded(embeddings.reshape(-1, embeddings.shape[-1]), kept_index, norms, salience)


def prefill(
    chain: Chain,
    plan: Plan | None,
    rows: Array,
    visual: Array,
    text: Array,
    clock: Stopwatch,
    *,
    positions: Positions | None = None,
    norms: Array | None = None,
    images: Images | None = None,
) -> Prefill:
    """The first pass over `rows` [S,d]; `visual` and `text` are the row numbers of visual and scoring text tokens.

    `positions` are 0, 1, 2, ... where none are given. `norms` [G,N] are the image's: plans that keep shares of N
    read N off them. `images` tell those of several images apart; without, all visual rows are of one.
    """
    backend = chain.backend
    positions = positions or Positions.in_line(len(rows))
    selects = plan.select_after if plan else {}
    compact = plan is not None and plan.positions == "compact"
    # Loading an engine is no part of a prefill.
    engines = {int(layer): chain.plan_engine(graph) for layer, graph in selects.items()}
    if images is None:
        images = Images(np.zeros(len(visual), np.int64), [plan.counts.stages if plan else ()])
    kept_after = dict(zip(engines, zip(*images.stages, strict=True), strict=True))
    group = images.group
    with clock.measure("prefill"):
        cos, sin = chain.rotary.tables(positions.rows)
        state = {
            "hidden": backend.tensor(rows[None]),
            "cos": backend.tensor(cos),
            "sin": backend.tensor(sin),
            "visual_index": backend.tensor(visual.astype(np.int64)),
            "text_index": backend.tensor(text.astype(np.int64)),
        }
        told = {} if norms is None else {"norms": backend.tensor(norms)}
        cache = KVCache([], [], [])
        result = Prefill(None, cache)
        length = len(rows)
        for decoder, layers in zip(chain.decoders, chain.segments, strict=True):
            past = {name: chain.no_past for layer in layers for name in _past_names(layer)}
            outputs = decoder({"hidden": state["hidden"], "cos": state["cos"], "sin": state["sin"], **past})
            cache.past.append(_grown(outputs, layers))
            cache.lengths.append(length)
            cache.next_positions.append(length if compact else positions.next)
            result.tokens_per_layer += [length] * len(layers)
            state["hidden"] = outputs["hidden_out"]
            last = layers[-1]
            if last in engines:
                # Known from the plan: asking the device for a shape would wait for it.
                quota = _quota(group, kept_after[last])
                with clock.measure("select"):
                    asked = {"query": outputs["query"], "key": outputs[f"key_{last}"], **told}
                    if chain.several_images:
                        asked |= {"visual_group": backend.tensor(group), "quota": backend.tensor(quota)}
                    selected = engines[last]({**state, **asked})
                state = {name: selected[f"{name}_out"] for name in state}
                result.keep_index[last] = selected["keep_index"]
                length, group = length - (len(group) - len(quota)), quota
        result.logits = chain.head({"hidden": state["hidden"]})["logits"]
    return result


def _quota(group: Array, kept: Sequence[int]) -> Array:
    """Of rows of the images `group` [V], ascending, at most as many of each as `kept` says."""
    return np.repeat(np.arange(len(kept)), np.minimum(np.bincount(group, minlength=len(kept)), kept))


def surviving_rows(chain: Chain, result: Prefill) -> dict[int, Array]:
    """After each pruning layer: the rows of the prefill's input that survived so far, ascending."""
    rows = np.arange(result.tokens_per_layer[0])
    survivors = {}
    for layer, keep in result.keep_index.items():
        rows = rows[chain.backend.numpy(keep)]
        survivors[layer] = rows
    return survivors


def decode_one_token(chain: Chain, cache: KVCache, row: Array) -> Tensor:
    """One token's embedding `row` [d] through all layers; grows `cache` and returns logits [1,vocab]."""
    backend = chain.backend
    hidden = backend.tensor(row[None, None])
    tables: dict[int, dict[str, Tensor]] = {}
    for segment, (decoder, layers) in enumerate(zip(chain.decoders, chain.segments, strict=True)):
        position = cache.next_positions[segment]
        if position not in tables:
            cos, sin = chain.rotary.tables(np.array([position]))
            tables[position] = {"cos": backend.tensor(cos), "sin": backend.tensor(sin)}
        outputs = decoder({"hidden": hidden, **tables[position], **cache.past[segment]})
        cache.past[segment] = _grown(outputs, layers)
        cache.lengths[segment] += 1
        cache.next_positions[segment] += 1
        hidden = outputs["hidden_out"]
    return chain.head({"hidden": hidden})["logits"]


def kv_bytes(chain: Chain, cache: KVCache) -> int:
    """Bytes of all keys and values in `cache`."""
    model = chain.model
    row = 2 * model.num_kv_heads * model.head_dim * chain.dtype.itemsize
    return sum(row * length * len(layers) for length, layers in zip(cache.lengths, chain.segments, strict=True))


def _past_names(layer: int) -> Sequence[str]:
    return (f"past_key_{layer}", f"past_value_{layer}")


def _grown(outputs: Mapping[str, Tensor], layers: range) -> dict[str, Tensor]:
    return {f"past_{which}_{layer}": outputs[f"{which}_{layer}"] for layer in layers for which in ("key", "value")}
