"""What power sensors share: their type, their readings, and joules from counters and from powers."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import NamedTuple

from sinkprune.contract.errors import PowerError

ROOT = Path("/")
SILENT_SECONDS = 3.0
"""A sensor without a new reading for this long counts as dead."""
PERIOD_SECONDS = 0.02
"""The time between two looks at a sensor that has to be polled."""


class Reading(NamedTuple):
    """A sensor's values at one moment."""

    seconds: float
    """By `time.monotonic`, which no change of the wall clock moves."""
    joules: float
    """Since the first reading, or the moment before it."""


class Sensor(NamedTuple):
    """A power sensor of this machine, or of a part of it."""

    name: str
    """One of `SENSORS`."""
    measures: str
    """The scope of its joules, in words for reports."""
    readings: Callable[[], Generator[Reading]]
    """Starts a generator, which waits for each reading. It raises `PowerError` after `SILENT_SECONDS` without one."""


class PowerIntegral:
    """Joules of a power that is read from time to time, by the trapezoidal rule."""

    def __init__(self) -> None:
        self._joules = 0.0
        self._last: tuple[float, float] | None = None

    def add(self, seconds: float, watts: float) -> float:
        """Add a power, measured at the moment `seconds`, and return the joules since the first one."""
        if self._last is not None:
            last_seconds, last_watts = self._last
            self._joules += (seconds - last_seconds) * (watts + last_watts) / 2
        self._last = seconds, watts
        return self._joules


def count_steps(read: Callable[[], list[int]], ranges: list[int], name: str) -> Iterator[tuple[float, int]]:
    """Yield the moment of each step of counters, and the sum of what they have counted since the start.

    `read` returns the counters, which restart at 0 after `ranges`. A counter moves in steps of its own, so a count
    that has not moved does not show when its energy was used. Raises `PowerError` after `SILENT_SECONDS` without a
    step, and what `read` raises.
    """
    total, last, moved = 0, read(), time.monotonic()
    while True:
        time.sleep(PERIOD_SECONDS)
        counts, now = read(), time.monotonic()
        if counts != last:
            total += sum((count - before) % full for count, before, full in zip(counts, last, ranges, strict=True))
            last, moved = counts, now
            yield now, total
        elif now - moved > SILENT_SECONDS:
            raise PowerError(f"{name} has not moved for {SILENT_SECONDS:.0f} seconds.")
