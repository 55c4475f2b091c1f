"""Frames that come at fixed times, whether anybody is ready for them or not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from sinkprune.contract.checks.ranges import RealNumber

RATE = RealNumber("--rate", 0.01, 1000, "from 0.01 to 1000 frames a second")
DURATION = RealNumber("--duration", 0.1, 86_400, "from 0.1 to 86400 seconds")


class Served(NamedTuple):
    """A frame that was answered; moments are those of the camera's clock."""

    frame: int
    """Its number, from 0."""
    came: float
    began: float
    ended: float


@dataclass(frozen=True)
class FrameClock:
    """A queue that holds the newest frame only, as drivers of cameras do for those who want no old ones.

    A frame that comes while an earlier one is answered waits until that is done, or until the next one takes its
    place: then it is missed.
    """

    rate: float
    """Frames a second."""
    frames: int
    """How many come."""
    duration: float
    """Seconds for which they come; waiting lasts no longer after the last answer."""
    clock: Callable[[], float] = time.monotonic
    """Seconds that no change of the wall clock moves."""
    sleep: Callable[[float], None] = time.sleep

    def serve(self, answer: Callable[[int], object]) -> Iterator[Served]:
        """Call `answer` with the number of each frame that is not missed; yield a `Served` after each call.

        The first comes at once. It ends when one more frame would come, or later, when all is answered.
        """
        start, taken = self.clock(), -1
        while taken < self.frames - 1:
            # Floats may say of a frame at the very moment of its coming that it is still to come.
            taken = max(taken + 1, min(int((self.clock() - start) * self.rate), self.frames - 1))
            came = start + taken / self.rate
            self._wait_until(came)
            began = self.clock()
            answer(taken)
            yield Served(taken, came, began, self.clock())
        self._wait_until(start + self.duration)

    def _wait_until(self, moment: float) -> None:
        left = moment - self.clock()
        while left > 0:
            self.sleep(left)
            left = moment - self.clock()


def frame_clock(rate: float, duration: float) -> FrameClock:
    """One whose frames come for `duration` seconds, at least one of them; raises `UsageError`."""
    rate, duration = RATE.check(rate), DURATION.check(duration)
    # A whole number of frames stays one, whatever floats make of the product.
    return FrameClock(rate, max(1, int(rate * duration + 1e-6)), duration)
