"""Frames that arrive at fixed times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from sinkprune.contract.checks.ranges import RealNumber

RATE = RealNumber("rate", 0.01, 1000, "from 0.01 to 1000 frames a second")
DURATION = RealNumber("duration", 0.1, 86_400, "from 0.1 to 86400 seconds")


class ServedFrame(NamedTuple):
    """An answered frame. Moments are in seconds of `FrameClock.clock`."""

    frame: int
    """Its number, from 0."""
    came: float
    began: float
    ended: float


@dataclass(frozen=True)
class FrameClock:
    """A camera with a queue of one frame, the newest.

    A frame that arrives during an answer waits for the end of this answer. If another frame arrives before, the
    waiting frame is missed.
    """

    rate: float
    """Frames a second."""
    frames: int
    """The number of frames that arrive."""
    duration: float
    """Seconds of arriving frames. `serve` lasts at least as long."""
    clock: Callable[[], float] = time.monotonic
    """Seconds of a clock that never jumps."""
    sleep: Callable[[float], None] = time.sleep

    def serve(self, answer: Callable[[int], object]) -> Iterator[ServedFrame]:
        """Call `answer` with the number of each frame that is not missed, and yield a `ServedFrame` after each call.

        The first frame arrives at once. Ends after `duration`, or with the last answer if that is later.
        """
        start, taken = self.clock(), -1
        while taken < self.frames - 1:
            # Rounding may place a frame that has just arrived in the future.
            taken = max(taken + 1, min(int((self.clock() - start) * self.rate), self.frames - 1))
            came = start + taken / self.rate
            self._wait_until(came)
            began = self.clock()
            answer(taken)
            yield ServedFrame(taken, came, began, self.clock())
        self._wait_until(start + self.duration)

    def _wait_until(self, moment: float) -> None:
        while (left := moment - self.clock()) > 0:
            self.sleep(left)


def frame_clock(rate: float, duration: float) -> FrameClock:
    """Return a camera that sends frames for `duration` seconds, at least one. Raises `UsageError`."""
    rate, duration = RATE.check(rate), DURATION.check(duration)
    # Rounding must not lose a frame of a whole number.
    return FrameClock(rate, max(1, int(rate * duration + 1e-6)), duration)
