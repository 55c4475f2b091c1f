"""The decoder's steps over engines and tensors: prefill, and one token after the other; and what each kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from sinkprune.contract.errors import BundleError
from sinkprune.contract.precision import Array
from sinkprune.contract.schedule import PictureSchedule, Schedule, VisualLayout
from sinkprune.runtime.backends import Backend, Cache, Tensor
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.steps.chain import Chain, EncodedPicture
from sinkprune.runtime.steps.prompt_rows import PromptRows
from sinkprune.runtime.text.prompt import Prompt

SCORED = ("hidden_out", "query", "key")
"""The outputs of a decoder segment that a select reads, each [...,S,width]."""


_MOST_AHEAD = 512
"""Rows of an answer for which caches have room at once; at LLaVA-1.5-7B's shape in fp16 they take 270 MB."""


class StoredRows(Protocol):
    """The first rows of a prompt in one decoder segment, from an earlier request."""

    @property
    def rows(self) -> int:
        """How many rows of what is stored belong to the prompt."""

    @property
    def saved(self) -> Any:
        """The keys and values, as `Decoder.save` returned them."""

    def joined(self, backend: Backend, outputs: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
        """Return the `SCORED` outputs of all `rows` of the prompt; `outputs` are those of later rows, or empty."""


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


@dataclass(frozen=True)
class Prefill:
    """The result of the first pass over a prompt: KV caches, and the rows that survived."""

    hidden: Tensor
    """[1,S,d] float on the device: the rows after the last layer. In a policy, whose last segment gives none, those
    before that segment."""
    cache: KVCache
    schedule: Schedule
    """What was kept."""
    keep_index: Mapping[int, Tensor]
    """After each pruning layer: the rows that survived it, among its input rows."""
    scored: Mapping[int, Mapping[str, Tensor]]
    """By segment with a select: its `SCORED` outputs, of all rows that the select read."""
    tokens_per_layer: list[int]
    """Visual tokens that each decoder layer ran on."""


def prefill(
    chain: Chain,
    schedule: Schedule,
    rows: PromptRows,
    clock: Stopwatch,
    norms: Tensor | None = None,
    stored: Sequence[StoredRows] = (),
    answer: int = 0,
) -> Prefill:
    """Run all rows of a prompt through the segments, with the selects of the schedule's plan between them.

    `norms` [G,N] are those of the first picture, for plans that keep shares of N: their selects read N from the
    shape. Bundles for several pictures use quotas in the place of shares. The first segments start after the rows
    that are `stored` of each. Caches expect `answer` rows more. Raises `BundleError` where the prompt's number of
    visual rows differs from the schedule.
    """
    backend, plan = chain.backend, schedule.plan
    compact = plan is not None and plan.positions == "compact"
    if len(rows.picture) != schedule.rows:
        raise other_rows("the step before the LLM", len(rows.picture), schedule.rows)
    text = rows.length - len(rows.picture)
    with clock.measure("prefill"):
        selects, cache = _Selects(chain, schedule, rows, norms, clock), KVCache([], [])
        keep_index, scored = dict[int, Tensor](), dict[int, Mapping[str, Tensor]]()
        given, start = {**selects.left, **rows.deepstack_inputs}, 0
        # From the schedule: reading a shape from the device would wait for it.
        visual = schedule.per_layer(chain.model.num_layers)
        for segment, (decoder, layers) in enumerate(zip(chain.decoders, chain.segments, strict=True)):
            length, last = text + visual[layers.start], layers[-1]
            earlier = stored[segment] if segment < len(stored) else None
            expected = length + min(answer, _MOST_AHEAD)
            own = (
                decoder.restore(earlier.saved, earlier.rows, length, expected)
                if earlier
                else decoder.new_cache(expected)
            )
            outputs: Mapping[str, Tensor] = {}
            if own.length < length:
                if own.length > start:
                    later = np.arange(own.length - start, length - start)
                    given = {name: backend.join([tensor], later) for name, tensor in given.items()}
                start = own.length
                outputs = decoder(given, own)
            cache.segments.append(own)
            cache.next_positions.append(length if compact else rows.next_position)
            if last in selects.kept:
                if earlier:
                    outputs = earlier.joined(backend, outputs, length)
                scored[segment] = {name: outputs[name] for name in SCORED}
                keep_index[last] = selects(last, outputs)
                given, start = selects.left, 0
            elif "hidden_out" in outputs:
                given = {"hidden": outputs["hidden_out"], "cos": given["cos"], "sin": given["sin"]}
    chain.note_prefill(plan, text, len(rows.picture))
    return Prefill(given["hidden"], cache, schedule, keep_index, scored, visual)


class _Selects:
    """The selects of a plan, and the rows of one prompt that are left between them."""

    def __init__(
        self, chain: Chain, schedule: Schedule, rows: PromptRows, norms: Tensor | None, clock: Stopwatch
    ) -> None:
        """Begin with all `rows`; `norms` and `clock` are those of `prefill`."""
        plan = schedule.plan
        self.kept = schedule.kept
        """By pruning layer: the rows of each picture that survive it."""
        after = plan.select_after if plan else {}
        self._engines = {int(layer): chain.plan_engine(graph) for layer, graph in after.items()}
        self._chain, self._clock, self._picture = chain, clock, rows.picture
        self._norms = {} if norms is None else {"norms": norms}
        querying = rows.actions if plan and plan.queries == "actions" else rows.text
        self._state = rows.state(chain.backend, chain.rotary) | {"text_index": chain.backend.tensor(querying)}

    @property
    def left(self) -> dict[str, Tensor]:
        """The inputs of the next segment, with the rows that are left."""
        return {name: self._state[name] for name in ("hidden", "cos", "sin")}

    def __call__(self, layer: int, outputs: Mapping[str, Tensor]) -> Tensor:
        """Run the select after `layer` on the `outputs` of its segment, and return its `keep_index`."""
        scored = {name: outputs[name] for name in ("query", "key")}
        given = {**self._state, "hidden": outputs["hidden_out"], **scored, **self._norms}
        with self._clock.measure("select"):
            if self._chain.several_images:
                rows, tensor = self.kept[layer], self._chain.backend.tensor
                quota = np.repeat(np.arange(len(rows)), rows)
                given |= {"visual_group": tensor(self._picture), "quota": tensor(quota)}
                self._picture = quota
            selected = self._engines[layer](given)
        self._state = {name: selected[f"{name}_out"] for name in self._state}
        return selected["keep_index"]


def first_logits(chain: Chain, prefilled: Prefill, clock: Stopwatch) -> Tensor:
    """Return the logits [1,vocab] of the first token, as a part of the prefill."""
    return clock.timed("prefill", chain.last, {"hidden": prefilled.hidden})["logits"]


def other_rows(graph: str, found: int, expected: int) -> BundleError:
    """Return the error for a `graph` that kept another number of rows than the schedule."""
    return BundleError(
        f"{graph} kept {found} visual tokens, the bundle says {expected}. Its graphs and its manifest do not belong "
        "together: export it again."
    )


def decode_one_token(chain: Chain, cache: KVCache, row: Array) -> Tensor:
    """Run one token's embedding `row` [d] through all layers; grows `cache`, and returns logits [1,vocab]."""
    if chain.token_decoder is None:
        return chain.last({"hidden": run_rows(chain, cache, row[None])})["logits"]
    first, *others = _of_segments(chain, cache, 1)
    return chain.token_decoder([{"hidden": chain.backend.tensor(row[None, None]), **first}, *others], cache.segments)


def run_rows(chain: Chain, cache: KVCache, rows: Array) -> Tensor:
    """Run the embeddings `rows` [S,d] of the next tokens through all layers; grows `cache`, and returns [1,S,d].

    Several rows at once need a chain that `resumes`.
    """
    hidden = chain.backend.tensor(rows[None])
    inputs = _of_segments(chain, cache, len(rows))
    for decoder, own, segment in zip(chain.decoders, inputs, cache.segments, strict=True):
        hidden = decoder({"hidden": hidden, **own}, segment)["hidden_out"]
    return hidden


def _of_segments(chain: Chain, cache: KVCache, count: int) -> list[dict[str, Tensor]]:
    """Return what each segment takes of the next `count` rows besides `hidden`; moves the positions of `cache`."""
    tables: dict[int, dict[str, Tensor]] = {}
    for position in cache.next_positions:
        if position not in tables:
            cos, sin = map(chain.backend.tensor, chain.rotary.tables(np.arange(position, position + count)))
            tables[position] = {"cos": cos, "sin": sin}
    inputs = [tables[position] for position in cache.next_positions]
    inputs[0] = inputs[0] | (chain.deepstack_token if count == 1 else chain.deepstack_zeros(count))
    cache.next_positions[:] = [position + count for position in cache.next_positions]
    return inputs


def kv_bytes(chain: Chain, lengths: Sequence[int]) -> int:
    """Return the bytes of the keys and values of so many rows in each of the first segments."""
    model = chain.model
    row = 2 * model.num_kv_heads * model.head_dim * chain.dtype.itemsize
    return sum(row * length * len(layers) for length, layers in zip(lengths, chain.segments, strict=False))


@dataclass(frozen=True)
class Kept:
    """What each step kept of a picture's visual tokens: G' groups of N' tokens, with indices into the N'."""

    layout: VisualLayout = field(repr=False)
    """Tokens, groups and places of the picture."""
    schedule: PictureSchedule
    """How many tokens the budget keeps at each step."""
    index: Array = field(repr=False)
    """[G',n0] the tokens the LLM received; with a sink, the first of each group represents its outliers."""
    norms: Array = field(repr=False)
    """[G',N'] fp32: the norm of each token in the vision tower."""
    salience: Array = field(repr=False)
    """[G',N'] fp32: the attention each token receives in the vision tower."""
    after_stage: Mapping[int, Array] = field(repr=False)
    """By pruning layer: which tokens of `index` survived it, as positions in the flattened `index`, ascending. Their
    numbers are `tokens[after_stage[layer]]`."""
    merged: Array | None = field(default=None, repr=False)
    """[G',N'] int64: the token that each token was merged into in the vision tower, or its own number; None where the
    tower merges none. `index` has the former, and `norms` and `salience` are theirs."""

    @property
    def tokens(self) -> Array:
        """`[G'*n0]` int64: the tokens of `index`, numbered through all groups."""
        groups, tokens = self.norms.shape
        return (self.index + tokens * np.arange(groups)[:, None]).ravel()

    def as_json(self) -> dict[str, Any]:
        """Return how many of the tokens the decoder received, and how many survived each stage, for `json.dumps`."""
        return {
            "visual_tokens": self.layout.all_tokens,
            "kept_after_sanitizer": self.index.size,
            "after_stage": {str(layer): len(rows) for layer, rows in self.after_stage.items()},
        }


def surviving_rows(backend: Backend, rows: PromptRows, result: Prefill) -> dict[int, Array]:
    """Return, by pruning layer, which of the prompt's `rows` survived so far, ascending.

    Raises `BundleError` where a graph kept another number of rows than the schedule: the report would be wrong.
    """
    left, text, survivors = np.arange(rows.length), rows.length - len(rows.picture), dict[int, Array]()
    for layer, keep in result.keep_index.items():
        left, expected = left[backend.numpy(keep)], sum(result.schedule.kept[layer])
        if len(left) - text != expected:
            raise other_rows(f"the select after layer {layer}", len(left) - text, expected)
        survivors[layer] = left
    return survivors


@dataclass(frozen=True)
class PromptRun:
    """A prompt after the prefill at one budget."""

    prompt: Prompt
    layouts: Sequence[VisualLayout]
    encoded: Sequence[EncodedPicture]
    rows: PromptRows
    prefilled: Prefill
    reused_rows: int
    """How many first rows an earlier request had computed, in the first decoder segment."""
    reused_pictures: bool
    """Whether rows of the pictures were reused."""

    def check(self) -> None:
        """Raise `NumericsError` if the tower's norms or salience are not finite; called when the prefill is done."""
        for picture in self.encoded:
            picture.scores.check()

    def reported(self, chain: Chain) -> dict[str, Any]:
        """Return the fields of an `Answer` about the prompt, by name; raises what `kept` raises."""
        return {
            "budget": self.prefilled.schedule.budget,
            "tokens_per_layer": self.prefilled.tokens_per_layer,
            "kv_bytes": kv_bytes(chain, self.prefilled.cache.lengths),
            "images": self.kept(chain.backend),
            "reused_rows": self.reused_rows,
        }

    def kept(self, backend: Backend) -> tuple[Kept, ...]:
        """Return what each step kept of each picture's visual tokens; raises what `surviving_rows` raises."""
        rows, kept = self.rows, list[Kept]()
        survivors, pictures = surviving_rows(backend, rows, self.prefilled), self.prefilled.schedule.pictures
        for number, (layout, own, planned) in enumerate(zip(self.layouts, self.encoded, pictures, strict=True)):
            own_rows = rows.picture == number
            visual, source = (each[own_rows] for each in rows.on_host[:2])
            after_stage = {layer: np.sort(source[np.isin(visual, left)]) for layer, left in survivors.items()}
            index, norms, salience, merged = own.on_host()
            kept.append(Kept(layout, planned, index, norms, salience, after_stage, merged))
        return tuple(kept)
