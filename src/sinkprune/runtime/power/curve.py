"""Energy over time, from a sensor's readings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sinkprune.contract.precision import Array

MOST_GAP_SECONDS = 1.0
"""The longest time between two readings for which energy is interpolated."""


class EnergyCurve:
    """Joules over time, interpolated linearly between readings."""

    def __init__(self, seconds: Sequence[float], joules: Sequence[float]) -> None:
        """Take the readings' moments, by `time.monotonic`, and joules since the sensor's start."""
        self._seconds, self._joules = np.array(seconds), np.array(joules)

    def joules(self, start: float, end: float) -> float | None:
        """Return the joules from `start` to `end`, idle included; None without readings around them, or with gaps."""
        first = int(np.searchsorted(self._seconds, start, side="right")) - 1
        last = int(np.searchsorted(self._seconds, end, side="left"))
        if first < 0 or last >= len(self._seconds):
            return None
        if np.diff(self._seconds[first : last + 1]).max(initial=0.0) > MOST_GAP_SECONDS:
            return None
        return float(np.diff(np.interp([start, end], self._seconds, self._joules))[0])

    def sampled_seconds(self, start: float, end: float) -> float:
        """Return the time from the first to the last reading between `start` and `end`."""
        inside = self._seconds[self._inside(start, end)]
        return float(inside[-1] - inside[0]) if len(inside) else 0.0

    def watts(self, start: float, end: float) -> list[float]:
        """Return the mean power between every two adjacent readings from `start` to `end`."""
        inside = self._inside(start, end)
        seconds, joules = np.diff(self._seconds[inside]), np.diff(self._joules[inside])
        return (joules[seconds > 0] / seconds[seconds > 0]).tolist()

    def gaps(self) -> list[float]:
        """Return the seconds between every two adjacent readings."""
        return np.diff(self._seconds).tolist()

    def _inside(self, start: float, end: float) -> Array:
        return (self._seconds >= start) & (self._seconds <= end)
