"""The decoder's steps: prefill, and one token after the other. Plain functions over engines and tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sinkprune.contract.errors import BundleError
from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.precision import Array
from sinkprune.contract.schedule import Schedule
from sinkprune.runtime.backends import Cache, Tensor
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.steps.answer import Kept
from sinkprune.runtime.steps.chain import Chain
from sinkprune.runtime.steps.encoding import Encoded
from sinkprune.runtime.steps.prompt_rows import PromptRows


@dataclass
class KVCache:
    """The caches of all decoder segments, each with its own length."""

    segments: list[Cache]
    next_positions: list[int]
    """The position id of the next token in each segment; they differ where positions are compact."""

    @property
    def lengths(self) -> list[int]:
        """How many rows each segment's cache holds."""
        return [cache.length for cache in self.segments]


@dataclass
class Prefill:
    """The result of the first pass over a prompt: logits, KV caches, and the rows that survived."""

    logits: Tensor
    cache: KVCache
    tokens_per_layer: list[int] = field(default_factory=list)
    """The sequence length each layer ran on."""
    keep_index: dict[int, Tensor] = field(default_factory=dict)
    """After each pruning layer: the rows that survived it, among its input rows."""


def prefill(
    chain: Chain, schedule: Schedule, rows: PromptRows, clock: Stopwatch, norms: Tensor | None = None
) -> Prefill:
    """Run all rows of a prompt through the segments, with the selects of the schedule's plan between them.

    `norms` [G,N] are the picture's, for plans that keep shares of N: their selects read N from the shape. Raises
    `BundleError` where the prompt's number of visual rows differs from the schedule.
    """
    backend, plan = chain.backend, schedule.plan
    compact = plan is not None and plan.positions == "compact"
    _check_rows("the sanitizer", len(rows.visual), schedule.rows)
    text = rows.length - len(rows.visual)
    with clock.measure("prefill"):
        cos, sin = chain.rotary.tables(rows.positions.rows)
        state = {
            "hidden": rows.hidden,
            "cos": backend.tensor(cos),
            "sin": backend.tensor(sin),
            "visual_index": backend.tensor(rows.visual.astype(np.int64)),
            "text_index": backend.tensor(rows.text.astype(np.int64)),
        }
        shares_of = {} if norms is None else {"norms": norms}
        added = rows.beside
        result = Prefill(None, KVCache([], []))
        picture = rows.picture
        for decoder, layers in zip(chain.decoders, chain.segments, strict=True):
            # From the schedule: reading a shape from the device would wait for it.
            length = text + schedule.reaching(layers.start)
            cache = decoder.new_cache()
            outputs = decoder({"hidden": state["hidden"], "cos": state["cos"], "sin": state["sin"], **added}, cache)
            # Only the first segment takes these.
            added = {}
            result.cache.segments.append(cache)
            result.cache.next_positions.append(length if compact else rows.positions.next)
            result.tokens_per_layer += [length] * len(layers)
            state["hidden"] = outputs["hidden_out"]
            last = layers[-1]
            if plan is not None and str(last) in plan.select_after:
                select, kept_rows = chain.plan_engine(plan.select_after[str(last)]), schedule.kept_after(last)
                with clock.measure("select"):
                    scored = {"query": outputs["query"], "key": outputs["key"], **shares_of}
                    if chain.several_images:
                        quota = np.repeat(np.arange(len(kept_rows)), kept_rows)
                        scored |= {"visual_group": backend.tensor(picture), "quota": backend.tensor(quota)}
                        picture = quota
                    selected = select({**state, **scored})
                state = {name: selected[f"{name}_out"] for name in state}
                result.keep_index[last] = selected["keep_index"]
        result.logits = chain.head({"hidden": state["hidden"]})["logits"]
    return result


def surviving_rows(chain: Chain, schedule: Schedule, result: Prefill) -> dict[int, Array]:
    """Return, by pruning layer, the rows of the prefill's input that survived so far, ascending.

    Raises `BundleError` where a graph kept another number of rows than the schedule: the report would be wrong.
    """
    rows = np.arange(result.tokens_per_layer[0])
    text, survivors = len(rows) - schedule.rows, {}
    for layer, keep in result.keep_index.items():
        rows = rows[chain.backend.numpy(keep)]
        _check_rows(f"the select after layer {layer}", len(rows) - text, sum(schedule.kept_after(layer)))
        survivors[layer] = rows
    return survivors


def kept_tokens(
    chain: Chain,
    schedule: Schedule,
    layouts: Sequence[VisualLayout],
    encoded: Sequence[Encoded],
    rows: PromptRows,
    result: Prefill,
) -> tuple[Kept, ...]:
    """Return what each step kept of each picture's visual tokens; raises what `surviving_rows` raises."""
    survivors, kept = surviving_rows(chain, schedule, result), []
    for number, (layout, own, picture) in enumerate(zip(layouts, encoded, schedule.pictures, strict=True)):
        own_rows = rows.picture == number
        visual, source = rows.visual[own_rows], rows.source[own_rows]
        after_stage = {layer: np.sort(source[np.isin(visual, left)]) for layer, left in survivors.items()}
        kept.append(Kept(layout, picture, own.kept_index, own.norms, own.salience, after_stage))
    return tuple(kept)


def _check_rows(graph: str, found: int, expected: int) -> None:
    if found != expected:
        raise BundleError(
            f"{graph} kept {found} visual tokens, the bundle says {expected}. Its graphs and its manifest do not "
            "belong together: export it again."
        )


def decode_one_token(chain: Chain, cache: KVCache, row: Array) -> Tensor:
    """Run one token's embedding `row` [d] through all layers; grows `cache`, and returns logits [1,vocab]."""
    backend = chain.backend
    hidden = backend.tensor(row[None, None])
    tables: dict[int, dict[str, Tensor]] = {}
    for segment, decoder in enumerate(chain.decoders):
        position = cache.next_positions[segment]
        if position not in tables:
            cos, sin = chain.rotary.tables(np.array([position]))
            tables[position] = {"cos": backend.tensor(cos), "sin": backend.tensor(sin)}
        added = {} if segment else chain.beside_token
        outputs = decoder({"hidden": hidden, **tables[position], **added}, cache.segments[segment])
        cache.next_positions[segment] += 1
        hidden = outputs["hidden_out"]
    return chain.head({"hidden": hidden})["logits"]


def kv_bytes(chain: Chain, cache: KVCache) -> int:
    """Return the bytes of all keys and values in `cache`, without unused capacity."""
    model = chain.model
    row = 2 * model.num_kv_heads * model.head_dim * chain.dtype.itemsize
    return sum(row * length * len(layers) for length, layers in zip(cache.lengths, chain.segments, strict=True))
