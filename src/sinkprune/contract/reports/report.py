"""The profile report: what `sinkprune-profile --json` writes, field by field."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sinkprune.contract.precision import WeightForms
from sinkprune.contract.reports.energy import BudgetEnergy, PowerReport

PARTS = (
    "preprocess",
    "vision",
    "sanitizer",
    "projector",
    "prefill",
    "select",
    "rest",
    "ttft",
    "per_token",
    "latency",
)
"""What is timed. `select` is part of `prefill`; `ttft` runs from the decoded image and the prompt string to the
first sampled token; `latency` is the whole answer."""
OF_TTFT = ("preprocess", "vision", "sanitizer", "projector", "prefill", "rest")
"""The parts that `ttft` is the sum of. `rest` is what none of the others is: rows laid out, results checked and read
back, the first token chosen."""


@dataclass(frozen=True)
class Spread:
    """Median and 95th percentile of repeated measurements."""

    median: float
    p95: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """The spread of at least one value; p95 is the smallest value not exceeded by 95 % of them."""
        ordered = sorted(values)
        return Spread(statistics.median(ordered), ordered[math.ceil(0.95 * len(ordered)) - 1])


@dataclass(frozen=True)
class PrefillAndTtft:
    """One figure for the prefill and one for the time to first token."""

    prefill: float
    ttft: float


@dataclass(frozen=True)
class Efficiency:
    """Measured speed-up over the one the FLOPs imply."""

    prefill: float


@dataclass(frozen=True)
class BudgetReport:
    """What was measured of one budget, beside what its FLOPs and bytes imply."""

    visual_tokens: int
    kept_after_sanitizer: int
    tokens_per_layer: tuple[int, ...]
    """Visual tokens each decoder layer ran on (input counting)."""
    mean_visual_tokens: float
    ms: dict[str, Spread | None]
    """Milliseconds by part; `per_token` is None where only one token was generated."""
    flops: PrefillAndTtft
    flops_speedup: PrefillAndTtft
    """Over the unpruned engines, by FLOPs alone."""
    speedup: PrefillAndTtft
    """Over the unpruned engines, by median milliseconds."""
    efficiency: Efficiency
    kv_bytes: int
    """Keys and values after the prefill."""
    peak_rss_bytes: int | None
    """Largest resident memory of the process during this budget's runs; None where the system does not tell."""
    stage_peak_rss_bytes: dict[str, int]
    """The same while each stage ran: vision, sanitizer, projector, prefill with its selects, decode. Of the budget's
    first run: engines keep what they once took, so a stage counts what those before it left."""
    decode_tokens_per_s: float | None
    decode_gb_per_s: float | None
    """Decoder and head weights plus KV cache, read once a token."""
    energy: BudgetEnergy | None
    """None without a power sensor, and where none of its readings tell of this budget's runs."""


@dataclass(frozen=True)
class Measured:
    """What was measured, and on what: the head of every report."""

    model: str
    backend: str
    precision: str
    """The type of hidden states and caches."""
    weights: WeightForms
    compute: str
    """What engines compute in, in words."""
    cache: str
    """The type of keys and values, in words."""
    method: str
    machine: str
    threads: int
    prompt_tokens: int
    """Text tokens of the rendered prompt."""
    new_tokens: int
    load_ms: float | None
    """Milliseconds from opening the engines to having loaded them, comparing sums included."""
    versions: dict[str, str]
    power: PowerReport | None
    """None where no joules were asked for."""


@dataclass(frozen=True)
class Report(Measured):
    """A profile: every budget against the unpruned engines, measured in turn."""

    repeat: int
    first_answer_ms: float | None
    """Milliseconds from opening the engines to the first token of the first answer, which engines take longer for
    than for others."""
    budgets: dict[str, BudgetReport]
