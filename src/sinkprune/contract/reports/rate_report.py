"""The report of `sinkprune-profile --rate`: requests at a camera's steady rate."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sinkprune.contract.reports.energy import RateEnergy
from sinkprune.contract.reports.report import ReportHeader, percentile


@dataclass(frozen=True)
class Latency:
    """Milliseconds of repeated requests. A percentile is the smallest value not exceeded by that share of them."""

    mean: float
    p50: float
    p95: float
    p99: float
    maximum: float
    jitter: float
    """Standard deviation; 0 for one value."""

    @staticmethod
    def of(values: Sequence[float]) -> Latency:
        """Return the statistics of at least one value."""
        ordered = sorted(values)
        p50, p95, p99 = (percentile(ordered, share) for share in (50, 95, 99))
        return Latency(statistics.fmean(ordered), p50, p95, p99, ordered[-1], statistics.pstdev(ordered))


@dataclass(frozen=True)
class BudgetRate:
    """The frames and answers of one budget."""

    visual_tokens: int
    """Of the first frame's prompt."""
    kept_after_sanitizer: int
    tokens_per_layer: tuple[int, ...]
    """Visual tokens in each decoder layer, of the first frame's prompt."""
    start_s: float
    """The time of the budget's first frame, in seconds from the first frame of all."""
    seconds: float
    """From the first frame to the last answer, or to the time of a frame after the last."""
    frames: int
    """The number of frames."""
    answered: int
    missed: int
    """Frames that came and went during the answer to an earlier one."""
    latency_ms: Latency
    """From a frame's arrival to its whole answer, with waiting."""
    busy_ms: Latency
    """From the start of a request to its whole answer."""
    answered_frames: tuple[int, ...]
    """The numbers of answered frames, from 0."""
    answer_latency_ms: tuple[float, ...]
    """The latency of each answered frame."""
    energy: RateEnergy | None
    """None without power readings of the whole time."""


@dataclass(frozen=True)
class ConditionsReport:
    """Temperatures and clocks, each a list as long as `seconds`, with None for missing readings."""

    seconds: tuple[float, ...]
    """From the first frame of all."""
    temperatures_c: dict[str, tuple[float | None, ...]]
    clocks_mhz: dict[str, tuple[float | None, ...]]


@dataclass(frozen=True)
class RateReport(ReportHeader):
    """Budgets in turn, each at a camera's steady rate."""

    rate_hz: float
    duration_s: float
    """The duration of frames for each budget."""
    pictures: int
    """The number of different prompts that frames alternate between."""
    warmup: int
    seen_share: float
    """The share of its area that the model sees of the picture it sees least of."""
    rates: dict[str, BudgetRate]
    """By the budget's name."""
    conditions: ConditionsReport
