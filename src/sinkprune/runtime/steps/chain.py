"""The graphs of a model in a chain: tower, sanitizer, projector, decoder segments and selects.

The baseline and every budget run the same weight engines. A plan adds weightless engines in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from threading import Lock
from typing import Any

import numpy as np

from sinkprune.contract.budgets import Plan
from sinkprune.contract.errors import NumericsError
from sinkprune.contract.manifest import MODULATION, Manifest
from sinkprune.contract.precision import DTYPES, Array
from sinkprune.contract.progress import OnProgress, unreported
from sinkprune.runtime.backends import Backend, Decoder, Engine, Tensor
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.families import Rotary

Wrap = Callable[[str, Engine, Backend], Engine]
"""Receives a graph's name, its loaded engine and the backend; returns the engine to run in its place."""


class Chain:
    """The engines of one bundle on one backend, with their names in the graph contract."""

    def __init__(
        self,
        manifest: Manifest,
        backend: Backend,
        load: Callable[[str], Engine],
        load_decoder: Callable[[str], Decoder],
        progress: OnProgress = unreported,
    ) -> None:
        """Load the weight engines; `load` and `load_decoder` return the engine of a graph, by the graph's name."""
        self.backend, self._load = backend, load
        self.model = model = manifest.language_model
        self.dtype: np.dtype[Any] = DTYPES[manifest.precision]
        self.segments = manifest.segments
        widths = {tensor.name: tensor.shape[-1] for tensor in manifest.graphs["vision"].outputs}
        self.visual_token_bytes = self.dtype.itemsize * (int(widths["tokens"]) + manifest.deepstack_width)
        """The bytes of the vision tower's output for one token."""
        self.several_images = manifest.max_images > 1
        self.rotary = Rotary(model.rope_theta, model.head_dim, self.dtype, model.rope_sections, model.rope_factor)
        self._prefills = set[tuple[Any, ...]]()
        """The kinds of prefills that are complete."""
        self._plan_engines: dict[str, Engine] = {}
        self._loading = Lock()
        loaded, total = count(), 3 + len(self.segments) + manifest.modulates

        def counted(graph: str) -> str:
            progress("loading the engines", next(loaded), total, "engines")
            return graph

        self.vision = load(counted("vision"))
        self.projector = load(counted(manifest.projector)) if manifest.projector else None
        self.decoders = [load_decoder(counted(f"decoder_{segment}")) for segment in range(len(self.segments))]
        self.last = load(counted(manifest.last_graph))
        """The engine after the decoder: `head`, or `expert` in a policy."""
        self.modulation = load(counted(MODULATION)) if manifest.modulates else None
        """The engine of what the expert reads of a step's time; None if the expert reads the time itself."""
        self._deepstack = manifest.deepstack_width
        self.deepstack_token = self.deepstack_zeros(1)

    def deepstack_zeros(self, rows: int) -> dict[str, Tensor]:
        """Return the additional inputs of `decoder_0` for text rows, by name: zeros [1,rows,E], or no input."""
        if not self._deepstack:
            return {}
        return {"deepstack": self.backend.tensor(np.zeros((1, rows, self._deepstack), self.dtype))}

    def plan_engine(self, graph: str) -> Engine:
        """Return a weightless engine of a plan, and load it on the first use."""
        with self._loading:
            if graph not in self._plan_engines:
                self._plan_engines[graph] = self._load(graph)
            return self._plan_engines[graph]

    @property
    def first_uses(self) -> int:
        """The number of weightless engines that are loaded, and of kinds of prefills that are complete.

        A request that raises it takes longer than usual.
        """
        return len(self._plan_engines) + len(self._prefills)

    def note_prefill(self, plan: Plan | None, text: int, visual: int) -> None:
        """Note that a prefill of `plan` is complete, with so many rows of text and pictures.

        There is one kind, except where engines compile what they first meet.
        """
        kind = (*(plan.graphs if plan else ()), text, visual) if self.backend.compiles_lengths else ()
        self._prefills.add(kind)

    def load_plan(self, plan: Plan | None) -> None:
        """Load the engines of `plan`, so that the time of a request does not include loading."""
        with self.backend.turn:
            for graph in plan.graphs if plan else ():
                self.plan_engine(graph)


@dataclass(frozen=True)
class EncodedPicture:
    """A picture as the LLM receives it: n0 kept tokens of each of G' groups of N' tokens."""

    embeddings: Tensor
    """[G',n0,d] float on the device, in the decoder's width."""
    kept_index: Array
    """[G',n0] int64: the token of each row, numbered within its group."""
    norms: Array
    """[G',N'] fp32: the norm of each token in the vision tower."""
    salience: Array
    """[G',N'] fp32: the attention each token receives in the vision tower."""
    deepstack: Tensor | None = None
    """[G',n0,E] float on the device: what the decoder's first layers add to each row, for models with DeepStack."""

    @property
    def source_tokens(self) -> Array:
        """[G'*n0] int64: the token of each row, numbered through all groups."""
        groups, tokens = self.norms.shape
        return (self.kept_index + tokens * np.arange(groups)[:, None]).ravel()


@dataclass(frozen=True)
class TowerOutput:
    """The outputs of the vision tower for a picture of G groups of N tokens."""

    tokens: Tensor
    """[G,N,D] float on the device."""
    device_norms: Tensor
    """[G,N] fp32 on the device."""
    device_salience: Tensor
    norms: Array
    """[G,N] fp32 on the host."""
    salience: Array
    deepstack: Tensor | None = None
    """[G,N,E] float on the device: what the decoder's first layers add to each token, for models with DeepStack."""


def run_tower(chain: Chain, inputs: Mapping[str, Array], clock: Stopwatch) -> TowerOutput:
    """Run the vision tower on the `inputs` of the graph `vision`, and wait for it.

    Raises `NumericsError` if tokens, norms or salience are not finite, before tokens are selected by them.
    """
    backend = chain.backend
    with clock.measure("vision"):
        features = chain.vision({name: backend.tensor(array) for name, array in inputs.items()})
    tokens, norms, salience = features["tokens"], features["norms"], features["salience"]
    # Waits for the tower once: norms, salience and tokens are complete together.
    host_norms, host_salience = backend.numpy(norms), backend.numpy(salience)
    tower = TowerOutput(tokens, norms, salience, host_norms, host_salience, features.get("deepstack"))
    _check_finite("norms or salience", tower.norms, tower.salience)
    if chain.projector is None:
        # Layers after the norms may still overflow. With a projector, the norms are those of the tokens.
        _check_finite("tokens", backend.numpy(tokens))
    return tower


def of_each_group(backend: Backend, tower: TowerOutput) -> list[TowerOutput]:
    """Return the `tower`'s output on G pictures of one group each, by picture."""
    groups, count = tower.norms.shape
    if groups == 1:
        return [tower]

    def own(group: int) -> TowerOutput:
        rows, one = np.arange(group * count, (group + 1) * count), slice(group, group + 1)
        norms, salience = tower.norms[one], tower.salience[one]
        deepstack = None if tower.deepstack is None else backend.join([tower.deepstack], rows)
        tokens = backend.join([tower.tokens], rows)
        return TowerOutput(tokens, backend.tensor(norms), backend.tensor(salience), norms, salience, deepstack)

    return [own(group) for group in range(groups)]


def encode(
    chain: Chain, plan: Plan | None, tower: TowerOutput, clock: Stopwatch, question: Tensor | None = None
) -> EncodedPicture:
    """Run the plan's sanitizer, if any, and the projector, if any, on the output of the `tower`.

    `question` [T,d] are its words as the decoder receives them, for sanitizers that read it.
    """
    if plan is None or plan.sanitizer is None:
        every = np.broadcast_to(np.arange(tower.norms.shape[1]), tower.norms.shape)
        return _projected(chain, tower, tower.tokens, tower.deepstack, every, clock)
    sanitizer = chain.plan_engine(plan.sanitizer)
    inputs = {"tokens": tower.tokens, "norms": tower.device_norms, "salience": tower.device_salience}
    if tower.deepstack is not None:
        inputs["deepstack"] = tower.deepstack
    if question is not None:
        inputs |= {"question": question, "embeddings": _in_llm(chain, tower.tokens, clock)}
    with clock.measure("sanitizer"):
        kept = sanitizer(inputs)
    index = chain.backend.numpy(kept["kept_index"])
    return _projected(chain, tower, kept["kept_tokens"], kept.get("kept_deepstack"), index, clock)


def _projected(
    chain: Chain, tower: TowerOutput, tokens: Tensor, deepstack: Tensor | None, kept_index: Array, clock: Stopwatch
) -> EncodedPicture:
    """Return the `tokens` with these `kept_index` [G',n0] as the LLM receives them."""
    if deepstack is not None:
        _check_finite("DeepStack features", chain.backend.numpy(deepstack))
    embeddings = _in_llm(chain, tokens, clock)
    # Frames that the sanitizer treats as one are one group from here on.
    groups = len(kept_index)
    norms, salience = (values.reshape(groups, -1) for values in (tower.norms, tower.salience))
    return EncodedPicture(embeddings, kept_index, norms, salience, deepstack)


def _in_llm(chain: Chain, tokens: Tensor, clock: Stopwatch) -> Tensor:
    """Return the tower's `tokens` as the LLM receives them."""
    if chain.projector is None:
        return tokens
    with clock.measure("projector"):
        return chain.projector({"tokens": tokens})["embeddings"]


def _check_finite(what: str, *arrays: Array) -> None:
    if not all(np.isfinite(array).all() for array in arrays):
        raise NumericsError(
            f"the vision tower gave {what} that are not finite, so neither a selection nor an answer is reliable. If "
            "the bundle is fp16, its values may exceed that type; export it with --precision fp32. openvino-gpu "
            "computes in fp16 unless --compute is fp32. If neither is so, the checkpoint's weights or its image "
            "processor's settings are damaged."
        )
