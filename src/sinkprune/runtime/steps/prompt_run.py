"""A prompt after its prefill, and which visual tokens each step kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sinkprune.contract.precision import Array
from sinkprune.contract.schedule import PictureSchedule, VisualLayout
from sinkprune.runtime.backends import Backend
from sinkprune.runtime.steps.chain import Chain, EncodedPicture
from sinkprune.runtime.steps.decoding import Prefill, kv_bytes, other_rows
from sinkprune.runtime.steps.prompt_rows import PromptRows
from sinkprune.runtime.text.prompt import Prompt


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
    left, text, survivors = np.arange(rows.length), rows.length - len(rows.visual), {}
    expected, indices = (
        result.schedule.kept,
        {layer: backend.numpy(keep) for layer, keep in result.keep_index.items()},
    )
    for layer, keep in indices.items():
        left = left[keep]
        if len(left) - text != sum(expected[layer]):
            raise other_rows(f"the select after layer {layer}", len(left) - text, sum(expected[layer]))
        survivors[layer] = left
    return survivors


def kept_tokens(
    backend: Backend,
    layouts: Sequence[VisualLayout],
    encoded: Sequence[EncodedPicture],
    rows: PromptRows,
    result: Prefill,
) -> tuple[Kept, ...]:
    """Return what each step kept of each picture's visual tokens; raises what `surviving_rows` raises."""
    survivors, kept = surviving_rows(backend, rows, result), []
    for number, (layout, own, planned) in enumerate(zip(layouts, encoded, result.schedule.pictures, strict=True)):
        own_rows = rows.picture == number
        visual, source = rows.visual[own_rows], rows.source[own_rows]
        after_stage = {layer: np.sort(source[np.isin(visual, left)]) for layer, left in survivors.items()}
        # A session gives the same arrays to later answers.
        index, norms, salience = map(_read_only, (own.kept_index, own.norms, own.salience))
        kept.append(Kept(layout, planned, index, norms, salience, after_stage))
    return tuple(kept)


def _read_only(array: Array) -> Array:
    """Return a view of the array that cannot be changed."""
    view = array.view()
    view.flags.writeable = False
    return view


@dataclass(frozen=True)
class PromptReport:
    """What is reported of a prompt. Refers to nothing on the device."""

    budget: str
    images: tuple[Kept, ...]
    tokens_per_layer: list[int]
    """Visual tokens that each decoder layer ran on."""
    kv_bytes: int
    reused_rows: int
    reused_pictures: bool
    """Whether rows of the pictures were reused."""


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

    def report(self, chain: Chain) -> PromptReport:
        """Return what each step kept of each picture's visual tokens, and sizes; raises `BundleError`."""
        result = self.prefilled
        return PromptReport(
            budget=result.schedule.budget,
            images=kept_tokens(chain.backend, self.layouts, self.encoded, self.rows, result),
            tokens_per_layer=result.schedule.per_layer(chain.model.num_layers),
            kv_bytes=kv_bytes(chain, result.cache.lengths),
            reused_rows=self.reused_rows,
            reused_pictures=self.reused_pictures,
        )
