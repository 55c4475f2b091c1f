"""Frames at fixed times, beside a simulation in small steps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkprune.contract.errors import UsageError
from sinkprune.contract.report import Latency
from sinkprune.runtime.profiling.rate import FrameClock, frame_clock

TICKS = 1024
"""Steps of a second: sums of them, and rates by powers of two, are exact in floats."""


class Time:
    """A clock that goes on when somebody sleeps or works, in ticks."""

    def __init__(self, now: int) -> None:
        self.now = now

    def clock(self) -> float:
        return self.now / TICKS

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * TICKS)


def simulated(period: int, frames: int, work: list[int]) -> list[tuple[int, int, int, int]]:
    """Frame, when it came, when it was begun, when it was answered: tick by tick."""
    queue: int | None = None
    busy_until, taken, served = 0, 0, []
    now = 0
    while now < period * frames or queue is not None or now < busy_until:
        if now % period == 0 and now // period < frames:
            # The newest takes the place of one that waits.
            queue = now // period
        if queue is not None and now >= busy_until:
            busy_until = now + work[taken % len(work)]
            taken += 1
            served.append((queue, queue * period, now, busy_until))
            queue = None
        now += 1
    return served


@settings(max_examples=100, deadline=None)
@given(
    period=st.sampled_from([1, 2, 8, 16, 64, 128]),
    frames=st.integers(1, 20),
    work=st.lists(st.integers(0, 350), min_size=1, max_size=6),
    start=st.integers(0, 10**6),
)
def test_frames_are_answered_as_by_a_queue_of_the_newest(
    period: int, frames: int, work: list[int], start: int
) -> None:
    time, calls = Time(start), []

    def answer(frame: int) -> None:
        time.now += work[len(calls) % len(work)]
        calls.append(frame)

    source = FrameClock(TICKS / period, frames, period * frames / TICKS, time.clock, time.sleep)
    served = [(one.frame, *(round(TICKS * moment) - start for moment in one[1:])) for one in source.serve(answer)]
    assert served == simulated(period, frames, work)
    assert calls == [frame for frame, *_ in served]
    assert time.now - start >= period * frames


def test_a_camera_sends_as_many_frames_as_fit_into_its_time() -> None:
    # In floats 100 * 0.29 is less than 29.
    for rate, seconds, frames in ((5, 60, 300), (0.1, 1, 1), (29.97, 10, 299), (3, 0.3, 1), (100, 0.29, 29)):
        assert frame_clock(rate, seconds).frames == frames
    with pytest.raises(UsageError, match=r"^rate is 0, expected from 0\.01 to 1000 frames a second\.$"):
        frame_clock(0, 60)
    with pytest.raises(UsageError, match="duration is nan"):
        frame_clock(5, float("nan"))


def test_percentiles_are_values_that_were_measured() -> None:
    found = Latency.of([float(value) for value in range(100, 0, -1)])
    assert (found.p50, found.p95, found.p99, found.maximum, found.mean) == (50, 95, 99, 100, 50.5)
    assert found.jitter == pytest.approx(28.866, abs=1e-3)
    assert Latency.of([7.0]) == Latency(7, 7, 7, 7, 7, 0)
    assert Latency.of([1.0, 2.0, 90.0]).p95 == 90
