"""The profile report: what `sinkprune-profile --json` writes, field by field."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sinkprune.contract.precision import WeightForms
from sinkprune.contract.reports.energy import BudgetEnergy, PowerReport
from sinkprune.contract.reports.rows import named_rows

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
"""The timed parts. `select` is part of `prefill`. `ttft` is the time from decoded image and prompt to the first
sampled token. `latency` is the whole answer."""
OF_TTFT = ("preprocess", "vision", "sanitizer", "projector", "prefill", "rest")
"""The parts that add up to `ttft`. `rest` is all other work: laying out rows, checking and reading results, and
sampling the first token."""


FEWEST_OF_P95 = 20
"""With fewer measurements, the 95th percentile is close to the slowest."""


def percentile(ordered: Sequence[float], share: int) -> float:
    """Return the smallest of the ascending values that is not exceeded by `share` % of them."""
    return ordered[math.ceil(share * len(ordered) / 100) - 1]


@dataclass(frozen=True)
class Spread:
    """Median and 95th percentile of repeated measurements."""

    median: float
    p95: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        return Spread(statistics.median(values), percentile(sorted(values), 95))


@dataclass(frozen=True)
class PrefillAndTtft:
    """One figure for the prefill and one for the time to first token."""

    prefill: float
    ttft: float


@dataclass(frozen=True)
class Efficiency:
    """Measured speed-up divided by the ideal speed-up by FLOPs."""

    prefill: float


@dataclass(frozen=True)
class BudgetReport:
    """The measurements of one budget, with the ideals by its FLOPs and bytes."""

    visual_tokens: int
    kept_after_sanitizer: int
    tokens_per_layer: tuple[int, ...]
    """Visual tokens in the input of each decoder layer."""
    mean_visual_tokens: float
    ms: dict[str, Spread | None]
    """Milliseconds by part; `per_token` is None where only one token was generated."""
    flops: PrefillAndTtft
    flops_speedup: PrefillAndTtft
    """Compared with the unpruned engines, by FLOPs alone."""
    speedup: PrefillAndTtft
    """Compared with the unpruned engines, by median milliseconds."""
    efficiency: Efficiency
    kv_bytes: int
    """Keys and values after the prefill."""
    peak_rss_bytes: int | None
    """Largest resident memory of the process during this budget's runs; None if it is unknown."""
    stage_peak_rss_bytes: dict[str, int]
    """The same during each stage: vision, sanitizer, projector, prefill with its selects, decode. Of the budget's
    first run that counts. Engines keep their memory, so a stage includes the memory of earlier stages."""
    decode_tokens_per_s: float | None
    decode_gb_per_s: float | None
    """Decoder and head weights and KV cache, read once a token."""
    energy: BudgetEnergy | None
    """None without power readings of this budget's runs."""
    warm_ttft_ms: Spread | None
    """Milliseconds to the first token of a second question about the picture in a `Session`; None if not measured."""


@dataclass(frozen=True)
class EngineHeader:
    """The head of every report: model, backend and machine."""

    model: str
    backend: str
    precision: str
    """The type of hidden states and caches."""
    weights: WeightForms
    compute: str
    """The type that engines compute in, in words."""
    cache: str
    """The type of keys and values, in words."""
    method: str
    machine: str
    threads: int
    prompt_tokens: int
    """Text tokens of the rendered prompt."""
    load_ms: float | None
    """Milliseconds of opening and loading the engines, with comparing sums."""
    versions: dict[str, str]


@dataclass(frozen=True)
class ReportHeader(EngineHeader):
    """The head of every report about answers."""

    new_tokens: int
    power: PowerReport | None
    """None if no joules were requested."""


@dataclass(frozen=True)
class ProfileReport(ReportHeader):
    """A profile: every budget and the unpruned engines, measured in turn."""

    repeat: int
    first_answer_ms: float | None
    """Milliseconds from opening the engines to the first token of the first answer, which takes longer than later
    ones."""
    seen_share: tuple[float, ...]
    """For each picture, the share of its area that the model sees."""
    budgets: dict[str, BudgetReport]
    baselines: dict[str, dict[str, BudgetReport]]
    """The same of `downsample` and `downsample-ttft`, by method and budget, where the bundle has them."""

    def rows(self) -> dict[str, BudgetReport]:
        """Return all figures by the names of their rows, in the order of a table."""
        return named_rows(self.budgets, self.baselines)
