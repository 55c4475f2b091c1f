"""What `sinkprune-profile --rate` writes, field by field: requests that a camera's steady rate asks for."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sinkprune.contract.reports.energy import RateEnergy
from sinkprune.contract.reports.report import Measured


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
        """Of at least one value."""
        ordered = sorted(values)
        p50, p95, p99 = (ordered[math.ceil(share * len(ordered) / 100) - 1] for share in (50, 95, 99))
        return Latency(statistics.fmean(ordered), p50, p95, p99, ordered[-1], statistics.pstdev(ordered))


@dataclass(frozen=True)
class BudgetRate:
    """How one budget kept up with the frames."""

    visual_tokens: int
    """Of the first frame's prompt."""
    kept_after_sanitizer: int
    tokens_per_layer: tuple[int, ...]
    """Visual tokens each decoder layer ran on, of the first frame's prompt."""
    start_s: float
    """When its first frame came, in seconds from the first frame of all."""
    seconds: float
    """From its first frame to its last answer, or to when the frame after the last would have come."""
    frames: int
    """How many came."""
    answered: int
    missed: int
    """How many came and went while an earlier one was answered."""
    latency_ms: Latency
    """From a frame's arrival to its whole answer, waiting included."""
    busy_ms: Latency
    """From the beginning of a request to its whole answer."""
    answered_frames: tuple[int, ...]
    """The number of each frame that was answered, from 0."""
    answer_latency_ms: tuple[float, ...]
    """The latency of each of them."""
    energy: RateEnergy | None
    """None without a power sensor, and where its readings do not tell of the whole time."""


@dataclass(frozen=True)
class ConditionsReport:
    """Temperatures, clocks and power, each a list as long as `seconds`, with None where nothing was told."""

    seconds: tuple[float, ...]
    """From the first frame of all."""
    temperatures_c: dict[str, tuple[float | None, ...]]
    clocks_mhz: dict[str, tuple[float | None, ...]]
    watts: tuple[float | None, ...]
    """The mean since the moment before, idle included."""


@dataclass(frozen=True)
class RateReport(Measured):
    """Budgets one after the other, each at a camera's steady rate."""

    rate_hz: float
    duration_s: float
    """How long frames came for each budget."""
    pictures: int
    """How many different prompts the frames took turns with."""
    warmup: int
    rates: dict[str, BudgetRate]
    """By the budget's name."""
    conditions: ConditionsReport
