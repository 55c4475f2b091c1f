"""Choose the frames of a topic that are answered, by their times alone."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

_NS = 1_000_000_000


class Fate(Enum):
    """What becomes of a frame."""

    CHOSEN = "chosen"
    OUTSIDE = "outside"
    """Before --start or after --end."""
    SKIPPED = "skipped"
    """A frame of the same period was chosen, or one of a later period."""
    AFTER_LIMIT = "after_limit"
    """--limit frames were chosen before."""


@dataclass(frozen=True)
class Sampling:
    """The frames that are wanted. Seconds count from the first frame of the topic."""

    start_s: float = 0.0
    end_s: float | None = None
    every_s: float = 0.0
    """The length of a period, of which the first frame is chosen; 0 chooses every frame."""
    limit: int | None = None
    """The most frames that are chosen."""


class FrameChooser:
    """Chooses frames one after the other. The same times and settings give the same choice again."""

    def __init__(self, sampling: Sampling) -> None:
        """Start before the first frame."""
        self._wanted, self._period, self._chosen = sampling, -1, 0
        self._first_ns: int | None = None

    def fate(self, time_ns: int) -> Fate:
        """Return what becomes of the next frame, which was recorded at `time_ns`."""
        wanted = self._wanted
        if self._first_ns is None:
            self._first_ns = time_ns
        # In whole nanoseconds, because a float of the seconds since 1970 is not exact.
        since_ns = time_ns - self._first_ns
        if since_ns < round(wanted.start_s * _NS) or (
            wanted.end_s is not None and since_ns > round(wanted.end_s * _NS)
        ):
            return Fate.OUTSIDE
        if wanted.limit is not None and self._chosen >= wanted.limit:
            return Fate.AFTER_LIMIT
        if wanted.every_s:
            period = since_ns // max(1, round(wanted.every_s * _NS))
            if period <= self._period:
                return Fate.SKIPPED
            self._period = period
        self._chosen += 1
        return Fate.CHOSEN
