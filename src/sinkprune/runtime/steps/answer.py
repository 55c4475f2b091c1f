"""An answer: its text, its times, and how it met a deadline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sinkprune.contract.checks import to_json
from sinkprune.contract.errors import UsageError
from sinkprune.runtime.steps.decoding import Kept

OF_TTFT = ("preprocess", "vision", "sanitizer", "projector", "prefill", "rest")
"""The parts that add up to `ttft`. `rest` is all other work: laying out rows, checking and reading results, and
sampling the first token."""
PARTS = (*OF_TTFT[:-1], "select", "rest", "ttft", "per_token", "latency")
"""The timed parts. `select` is part of `prefill`. `ttft` is the time from decoded image and prompt to the first
sampled token. `latency` is the whole answer."""


@dataclass(frozen=True)
class DeadlineOutcome:
    """What the reports on the deadlines of answers and of chunks of actions have in common."""

    deadline_ms: float
    budget: str
    """The chosen budget, which is the one that ran."""
    reason: str
    """Why it was chosen, in words."""
    can_meet: bool
    """Whether the first token, or the chunk, was expected in time at all."""
    met: bool
    """Whether the whole answer or chunk was in time, also an answer that the deadline cut off (`finish`)."""
    measured_ms: float
    """When the whole answer or chunk was complete."""
    slower: float
    """The factor by which recent load was expected to delay the first token or the chunk, compared with the costs."""
    costs_age_s: float | None
    """Seconds since the costs were measured; None where they do not say."""
    costs_load: float | None
    """The share of the machine's processor time that other programs took while costs were measured, if known."""


@dataclass(frozen=True)
class DeadlineReport(DeadlineOutcome):
    """How a request met or missed its deadline. Milliseconds count from the beginning of the request, including the
    decoding of picture files.

    `met`: the answer ended within `deadline_ms`, whole or cut off. `can_meet`: its first token was expected in time,
    when `budget` was chosen. `reason`: why it was chosen, in words. `slower`: how many times its costs the first
    token was expected to take. docs/json.md explains each field.
    """

    expected_tokens: int
    """How many new tokens were expected in time; the answer may have more or fewer. Of a closed list, how many passes
    over its texts, of which the prompt is the first."""
    predicted_first_ms: float
    """When the first token was expected, predicted when the budget was chosen."""
    first_ms: float
    """When the first token was complete."""
    predicted_ms: float
    """When the last of `expected_tokens` was expected."""


@dataclass(frozen=True)
class Answer:
    """The text of an answer, with its tokens, times and what was kept of the pictures.

    `finish` is `stop`, `length`, `deadline` or `cancelled`. `ms` has milliseconds by part: `ttft` to the first token,
    `latency` to the last, `per_token`, and the parts of the first. `tokens_per_layer` counts visual tokens.
    docs/json.md explains each field.
    """

    text: str
    token_ids: list[int]
    finish: str
    """`stop` (the model or a stop string ended it, or its form is complete), `length` (max_new_tokens did),
    `deadline` (no time for more) or `cancelled` (`Stream.cancel` was called)."""
    method: str
    budget: str
    prompt_tokens: int
    """Text tokens of the rendered prompt, without visual tokens."""
    visual_tokens: int
    """Visual tokens of all pictures before anything is dropped."""
    tokens_per_layer: list[int]
    """Visual tokens each decoder layer ran on."""
    kv_bytes: int
    """Bytes of keys and values after the prefill."""
    ms: dict[str, float | None]
    """Milliseconds by part, those of `PARTS`; `per_token` is None for one token."""
    images: tuple[Kept, ...]
    """What each step kept of each picture's tokens."""
    reused_towers: int = 0
    """How many pictures a `Session` had encoded for an earlier request."""
    reused_rows: int = 0
    """How many rows of the prompt a `Session` took from an earlier request, in the decoder's layers before the first
    that prunes."""
    deadline: DeadlineReport | None = None
    """How the deadline was met or missed; None without a deadline."""
    choices: Mapping[str, float] = field(default_factory=dict)
    """The probability of each answer of the request's `choice` among these answers; empty without them."""

    @property
    def confidence(self) -> float | None:
        """The probability of the answer among the request's `choice`; None without one."""
        return self.choices[self.text] if self.choices else None

    @property
    def kept(self) -> Kept:
        """What each step kept of the first picture's tokens; raises `UsageError` for an answer without a picture."""
        if not self.images:
            raise UsageError("the answer is about no picture, so nothing was kept. Ask with a picture.")
        return self.images[0]

    def as_json(self) -> dict[str, Any]:
        """Return the answer without its arrays, for `json.dumps`.

        The keys are those of `sinkprune-run --json` about the answer: without `backend`, `precision`, `load_ms`,
        `memory` and `notes`.
        """
        left_out = ("images", "reused_towers", "reused_rows")
        return {
            **{name: to_json(value) for name, value in vars(self).items() if name not in left_out},
            "confidence": self.confidence,
            "seen_share": [kept.layout.seen_share for kept in self.images],
            "seen_size": [kept.layout.seen_size for kept in self.images],
            "seen_frames": [kept.layout.frames for kept in self.images],
            "kept_after_sanitizer": self.tokens_per_layer[0],
        }


def timings(ms: Mapping[str, float], steps: Sequence[float], text: float) -> dict[str, float | None]:
    """Milliseconds by the parts of `PARTS`.

    `ms` are those up to the first token by part, `steps` those of each later token, `text` those of decoding tokens
    to text.
    """
    found: dict[str, float | None] = {part: ms.get(part, 0.0) for part in PARTS}
    found["rest"] = ms["ttft"] - sum(ms.get(part, 0.0) for part in OF_TTFT)
    found["per_token"] = sum(steps) / len(steps) if steps else None
    found["latency"] = ms["ttft"] + sum(steps) + text
    return found
