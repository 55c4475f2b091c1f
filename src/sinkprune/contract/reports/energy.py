"""The energy fields of a profile: joules of answers, and the sensor."""

from __future__ import annotations

from dataclasses import dataclass

IDLE_SECONDS = 5.0
"""The default time for measuring idle power."""


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
    idle_watts: float
    """The mean power before the first request, with loaded engines. It is subtracted from requests."""
    failure: str | None
    """The sensor's error, if it failed. Later requests have no joules."""


@dataclass(frozen=True)
class BudgetEnergy:
    """Mean joules of one budget's answers, from the request to the last token."""

    runs: int
    left_out: int
    """Runs without joules: the sensor had failed, or was silent for more than a second."""
    joules: float
    """Without idle watts times the answer's time. May be below zero if both are about equal."""
    joules_with_idle: float
    deviation: float | None
    """Standard deviation of `joules` over the runs; None for one run."""
    watts: float
    """Mean power of the answers, idle included."""
    estimated: bool
    """Whether an answer takes less than two periods of the sensor, so that its joules mostly belong to its
    neighbours."""


@dataclass(frozen=True)
class RateEnergy:
    """Joules of frames at a steady rate."""

    joules_per_frame: float
    """Of an answered frame, without idle power over the whole time, so that waiting counts too."""
    joules_per_frame_with_idle: float
    watts: float
    """Mean power of the whole time, idle included."""
