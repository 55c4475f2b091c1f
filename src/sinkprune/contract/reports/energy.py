"""What a profile says of energy: joules of requests and of their parts, and what they were measured with."""

from __future__ import annotations

from dataclasses import dataclass

IDLE_SECONDS = 5.0
"""How long idle power is measured where nobody says otherwise."""
SAMPLED_ENOUGH = 0.5
"""The least share of a part's time that must have been sampled: below, its joules are called estimated."""


@dataclass(frozen=True)
class IdlePower:
    """The power before the first request, with the engines loaded: what is subtracted."""

    watts: float
    """The mean."""
    p5: float
    """Watts that 5 % of the stretches between two readings lay below."""
    p95: float
    """Watts that 95 % of the stretches between two readings did not exceed."""
    seconds: float
    readings: int


@dataclass(frozen=True)
class PowerReport:
    """The sensor that joules were measured with."""

    sensor: str
    measures: str
    """What its joules are of: rails, domains or a GPU. Those of two machines compare only where this does."""
    period_ms: float
    """The median time between two readings."""
    longest_gap_ms: float
    """The longest time between two readings."""
    idle: IdlePower
    failure: str | None
    """Why the sensor told nothing more, where it died; requests behind that have no joules."""


@dataclass(frozen=True)
class PartEnergy:
    """Joules of one part of a request, means of the runs."""

    joules: float
    """Idle subtracted: idle watts times the part's time. May be below zero where both are about the same."""
    joules_with_idle: float
    deviation: float | None
    """Standard deviation of `joules` over the runs; None for one run."""
    sampled: float
    """The share of the part's time that lay between two readings which both fell into it. For the rest, the joules
    between two readings are spread evenly over the time between them."""
    estimated: bool
    """Whether `sampled` is below `SAMPLED_ENOUGH`: then the joules are mostly those of the parts around it."""


@dataclass(frozen=True)
class BudgetEnergy:
    """Joules of one budget's requests."""

    runs: int
    left_out: int
    """Runs without joules: the sensor had died, or told nothing for more than a second meanwhile."""
    watts: float
    """Mean power of the requests, idle included."""
    joules: dict[str, PartEnergy | None]
    """By part, those of `PARTS` in `report`; `latency` is the whole request, and `per_token`
    all that comes after the first token, divided by the tokens that came. None where a part has no time."""


@dataclass(frozen=True)
class RateEnergy:
    """Joules of frames that came at a steady rate."""

    joules_per_frame: float
    """Of an answered frame, idle subtracted over the whole time: waiting adds what it takes beyond idle."""
    joules_per_frame_with_idle: float
    watts: float
    """Mean power of the whole time, idle included."""
