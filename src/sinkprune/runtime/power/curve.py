"""What a sensor's readings say of any stretch of time between them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

MOST_GAP_SECONDS = 1.0
"""Longer between two readings, and nothing is said of the time between them."""


class EnergyCurve:
    """Joules over time: through the readings, and straight between two of them."""

    def __init__(self, seconds: Sequence[float], joules: Sequence[float]) -> None:
        """Of readings as they came: moments of `time.monotonic`, and joules since the sensor was started."""
        self._seconds, self._joules = np.array(seconds), np.array(joules)

    def joules(self, start: float, end: float) -> float | None:
        """Those used from `start` to `end`, idle included; None without readings around them, or with long gaps."""
        first, last = self._around(start, end)
        if first < 0 or last >= len(self._seconds):
            return None
        if np.diff(self._seconds[first : last + 1]).max(initial=0.0) > MOST_GAP_SECONDS:
            return None
        return float(np.diff(np.interp([start, end], self._seconds, self._joules))[0])

    def sampled_seconds(self, start: float, end: float) -> float:
        """How much of the time from `start` to `end` lies between two readings that both fell into it."""
        inside = self._seconds[(self._seconds >= start) & (self._seconds <= end)]
        return float(inside[-1] - inside[0]) if len(inside) else 0.0

    def watts(self, start: float, end: float) -> list[float]:
        """The power between each two readings next to each other that lie in the time from `start` to `end`."""
        inside = (self._seconds >= start) & (self._seconds <= end)
        points = zip(self._seconds[inside], self._joules[inside], strict=True)
        pairs = itertools.pairwise(points)
        return [float((joules - before) / (now - then)) for (then, before), (now, joules) in pairs if now > then]

    def gaps(self) -> list[float]:
        """Seconds between each two readings next to each other."""
        return [float(gap) for gap in np.diff(self._seconds)]

    def _around(self, start: float, end: float) -> tuple[int, int]:
        """The last reading at or before `start`, and the first at or behind `end`."""
        first = int(np.searchsorted(self._seconds, start, side="right")) - 1
        return first, int(np.searchsorted(self._seconds, end, side="left"))
