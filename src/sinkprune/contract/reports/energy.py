"""The energy fields of a profile: joules of requests and of their parts, and the sensor."""

from __future__ import annotations

from dataclasses import dataclass

IDLE_SECONDS = 5.0
"""The default time for measuring idle power."""
SAMPLED_ENOUGH = 0.5
"""The least share of a part's time that must be sampled. Below it, the joules are called estimated."""


@dataclass(frozen=True)
class IdlePower:
    """The power before the first request, with loaded engines. It is subtracted from requests."""

    watts: float
    """The mean."""
    p5: float
    """The 5th percentile of watts between two readings."""
    p95: float
    """The 95th percentile of watts between two readings."""
    seconds: float
    readings: int


@dataclass(frozen=True)
class PowerReport:
    """The power sensor."""

    sensor: str
    measures: str
    """The measured rails, domains or GPU. Joules of two machines compare only if these do."""
    period_ms: float
    """The median time between two readings."""
    longest_gap_ms: float
    """The longest time between two readings."""
    idle: IdlePower
    failure: str | None
    """The sensor's error, if it failed. Later requests have no joules."""


@dataclass(frozen=True)
class PartEnergy:
    """Mean joules of one part of a request over the runs."""

    joules: float
    """Without idle watts times the part's time. May be below zero if both are about equal."""
    joules_with_idle: float
    deviation: float | None
    """Standard deviation of `joules` over the runs; None for one run."""
    sampled: float
    """The share of the part's time between two readings within the part. The other joules are interpolated linearly
    between readings."""
    estimated: bool
    """Whether `sampled` is below `SAMPLED_ENOUGH`, so that the joules mostly belong to neighbouring parts."""


@dataclass(frozen=True)
class BudgetEnergy:
    """Joules of one budget's requests."""

    runs: int
    left_out: int
    """Runs without joules: the sensor had failed, or was silent for more than a second."""
    watts: float
    """Mean power of the requests, idle included."""
    joules: dict[str, PartEnergy | None]
    """By part of `PARTS` in `report`. `latency` is the whole request. `per_token` is the time after the first token,
    divided by its tokens. None for a part without time."""


@dataclass(frozen=True)
class RateEnergy:
    """Joules of frames at a steady rate."""

    joules_per_frame: float
    """Of an answered frame, without idle power over the whole time, so that waiting counts too."""
    joules_per_frame_with_idle: float
    watts: float
    """Mean power of the whole time, idle included."""
