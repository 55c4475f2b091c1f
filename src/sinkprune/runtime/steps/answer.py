"""An answer, and what became of the visual tokens on the way to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.precision import Array
from sinkprune.contract.reports.report import OF_TTFT, PARTS
from sinkprune.contract.schedule import PictureSchedule


@dataclass(frozen=True)
class Kept:
    """What became of a picture's visual tokens: G' groups of N' were sanitised apart, and indices are into the N'."""

    layout: VisualLayout = field(repr=False)
    """What the picture is to the model."""
    schedule: PictureSchedule
    """How many of the tokens were to be kept at each step, by the budget."""
    index: Array = field(repr=False)
    """[G',n0] the tokens the LLM received; row 0 of a plan with a sink stands for all outliers."""
    norms: Array = field(repr=False)
    """[G',N'] fp32: the norm of each token in the vision tower."""
    salience: Array = field(repr=False)
    """[G',N'] fp32: the attention each token receives in the vision tower."""
    after_stage: Mapping[int, Array] = field(repr=False)
    """By pruning layer: the places in `index` (flattened) that survived it, ascending."""


@dataclass(frozen=True)
class DeadlineReport:
    """What was done to answer in time. Milliseconds are counted from where the request began, decoding of the
    pictures' files included."""

    deadline_ms: float
    budget: str
    """The budget that was chosen, which is the one that ran."""
    reason: str
    """Why it was chosen, in words."""
    can_meet: bool
    """Whether a first token was expected in time, at that budget or any other."""
    met: bool
    """Whether the whole answer was there in time."""
    expected_tokens: int
    """How many new tokens were expected to fit; as many come as do."""
    predicted_first_ms: float
    """When the first token was expected; known when the budget was chosen."""
    first_ms: float
    """When it was there."""
    predicted_ms: float
    """When the last of `expected_tokens` was expected."""
    measured_ms: float
    """When the whole answer was there."""
    slower: float
    """How many times as long as by the machine's costs the first token was expected to take: recent load."""
    costs_age_s: float | None
    """Seconds since the costs were measured; None where they do not say."""
    costs_load: float | None
    """The share of the machine's processor time that other programs took while costs were measured, if known."""


@dataclass(frozen=True)
class Answer:
    """What a model said, and what it took: tokens, times and what became of the pictures."""

    text: str
    token_ids: list[int]
    finish: str
    """`stop` (the model or a stop string ended it), `length` (max_new_tokens did), `deadline` (no time for more) or
    `cancelled` (`Stream.cancel` was called)."""
    method: str
    budget: str
    prompt_tokens: int
    """Text tokens of the rendered prompt; visual tokens are counted apart."""
    visual_tokens: int
    """Visual tokens of all pictures before anything is dropped."""
    tokens_per_layer: list[int]
    """Visual tokens each decoder layer ran on."""
    kv_bytes: int
    """Bytes of keys and values after the prefill."""
    ms: dict[str, float | None]
    """Milliseconds by part, those of `sinkprune.contract.reports.report.PARTS`; `per_token` is None for one token."""
    images: tuple[Kept, ...]
    """What became of each picture's tokens."""
    deadline: DeadlineReport | None = None
    """What was done to answer in time; None where there was no deadline."""

    @property
    def kept(self) -> Kept:
        """What became of the first picture's tokens."""
        return self.images[0]


def timings(ms: Mapping[str, float], steps: Sequence[float], text: float) -> dict[str, float | None]:
    """Milliseconds by the parts of `sinkprune.contract.reports.report.PARTS`.

    `ms` are those up to the first token by part, `steps` those of each later token, `text` those of decoding tokens
    to text.
    """
    found: dict[str, float | None] = {part: ms.get(part, 0.0) for part in PARTS}
    found["rest"] = ms["ttft"] - sum(ms.get(part, 0.0) for part in OF_TTFT)
    found["per_token"] = sum(steps) / len(steps) if steps else None
    found["latency"] = ms["ttft"] + sum(steps) + text
    return found
