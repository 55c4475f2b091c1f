"""A prompt after its prefill, and what an answer or a chunk of actions reports of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sinkprune.contract.layout import VisualLayout
from sinkprune.runtime.steps.chain import Chain
from sinkprune.runtime.steps.decoding import Prefill, kv_bytes
from sinkprune.runtime.steps.encoding import EncodedPicture
from sinkprune.runtime.steps.kept import Kept, kept_tokens
from sinkprune.runtime.steps.prompt_rows import PromptRows
from sinkprune.runtime.text.prompt import Prompt


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
