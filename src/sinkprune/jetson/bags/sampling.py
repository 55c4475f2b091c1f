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
    """A frame of the same period was chosen, or one of a period before which this frame belongs."""
    AFTER_LIMIT = "after_limit"
    """--limit frames were chosen before."""


@dataclass(frozen=True)
class Sampling:
    """The frames that are wanted. Seconds count from the first frame of the topic."""

    start_s: float | None = None
    end_s: float | None = None
    every_s: float = 0.0
    """The length of a period, of which the first frame is chosen; 0 chooses every frame."""
    limit: int | None = None
    """The most frames that are chosen."""


class FrameChooser:
    """Chooses frames one after the other. The same times and settings give the same choice again."""

    def __init__(self, sampling: Sampling) -> None:
        """Start before the first frame."""
        self._wanted, self._count, self._chosen = sampling, 0, 0
        self._first_ns = self._last_ns = 0
        self._chosen_ns: int | None = None
        self.goes_back: tuple[int, int] | None = None
        """The number of the first frame that is older than the frame before it, and by how many nanoseconds."""

    def fate(self, time_ns: int) -> Fate:
        """Return what becomes of the next frame, which was recorded at `time_ns`."""
        wanted = self._wanted
        if not self._count:
            self._first_ns = time_ns
        elif time_ns < self._last_ns and self.goes_back is None:
            self.goes_back = self._count, self._last_ns - time_ns
        self._count, self._last_ns = self._count + 1, time_ns
        # In whole nanoseconds, because a float of the seconds since 1970 is not exact.
        since_ns = time_ns - self._first_ns
        if (wanted.start_s is not None and since_ns < round(wanted.start_s * _NS)) or (
            wanted.end_s is not None and since_ns > round(wanted.end_s * _NS)
        ):
            return Fate.OUTSIDE
        if wanted.limit is not None and self._chosen >= wanted.limit:
            return Fate.AFTER_LIMIT
        if wanted.every_s and self._chosen_ns is not None:
            every_ns = max(1, round(wanted.every_s * _NS))
            period, chosen = since_ns // every_ns, (self._chosen_ns - self._first_ns) // every_ns
            # A frame that is older by a whole period is after a clock that was set back. Others came late.
            if period <= chosen and time_ns > self._chosen_ns - every_ns:
                return Fate.SKIPPED
        self._chosen, self._chosen_ns = self._chosen + 1, time_ns
        return Fate.CHOSEN
