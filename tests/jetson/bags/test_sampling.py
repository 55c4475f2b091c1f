"""Which frames are chosen."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from sinkprune.jetson.bags.replay import Fate, FrameChooser, Sampling

MS = 1_000_000
START = 1_700_000_000_000_000_007


def chosen(sampling: Sampling, times_ms: list[float]) -> list[int]:
    chooser = FrameChooser(sampling)
    fates = [chooser.fate(START + round(time * MS)) for time in times_ms]
    return [number for number, fate in enumerate(fates) if fate is Fate.CHOSEN]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), list(range(10))),
        (Sampling(every_s=0.3), [0, 3, 6, 9]),
        (Sampling(every_s=0.25), [0, 3, 5, 8]),
        (Sampling(every_s=0.1), list(range(10))),
        (Sampling(every_s=0.001), list(range(10))),
        (Sampling(start_s=0.25), list(range(3, 10))),
        (Sampling(start_s=0.3, end_s=0.5), [3, 4, 5]),
        (Sampling(limit=2), [0, 1]),
        (Sampling(start_s=0.1, every_s=0.2, limit=3), [1, 2, 4]),
        (Sampling(end_s=0), [0]),
        (Sampling(start_s=5), []),
    ],
)
def test_frames_at_ten_a_second(sampling: Sampling, expected: list[int]) -> None:
    assert chosen(sampling, [100.0 * number for number in range(10)]) == expected


def test_a_camera_s_jitter_does_not_lower_the_rate() -> None:
    shaken = random.Random(1)
    times = [1000 * number / 30 + shaken.uniform(-3, 3) for number in range(3000)]
    times[0] = 0
    for rate in (1, 5, 10, 15):
        assert abs(len(chosen(Sampling(every_s=1 / rate), times)) - 100 * rate) <= 1


HOUR = 3_600_000.0


@pytest.mark.parametrize(
    "times_ms",
    [
        [0, 100, *(100 * number - HOUR for number in range(4))],
        [3000, 0, 1000, 2000, 4000, 5000],
        [5000, 4000, 3000, 2000, 1000, 0],
        [0, 0, 0, 100, 100],
        [0, 100, 200, HOUR, 300, 400],
        [0, -0.001, 0],
    ],
)
def test_no_frame_is_lost_to_its_time(times_ms: list[float]) -> None:
    assert chosen(Sampling(), times_ms) == list(range(len(times_ms)))
    assert chosen(Sampling(limit=3), times_ms) == [0, 1, 2]
    assert chosen(Sampling(end_s=2 * HOUR), times_ms) == list(range(len(times_ms)))


@pytest.mark.parametrize(
    ("every_s", "times_ms", "expected"),
    [
        # Set back by an hour, forward again, and by less than a period
        (0.2, [0, 100, 200, *(100 * number - HOUR for number in range(4))], [0, 2, 3, 5]),
        (1, [0, HOUR, 500, 900, 1000, HOUR + 1], [0, 1, 2, 4, 5]),
        (1, [0, 1000, 400, 600, 1400, 2000], [0, 1, 5]),
        # Late frames of a multi-threaded recorder
        (0.1, [0, 33, 99, 66, 133, 100, 199, 166, 200], [0, 4, 8]),
        (1, [5000, 4000, 3000, 2000, 1000, 0], [0, 1, 2, 3, 4, 5]),
        (1, [3000, 0, 1000, 2000, 4000, 5000], [0, 1, 2, 3, 4, 5]),
        (1, [0, 0, 1000, 1000, 1000], [0, 2]),
    ],
)
def test_periods_go_on_after_a_clock_that_is_set_back(
    every_s: float, times_ms: list[float], expected: list[int]
) -> None:
    assert chosen(Sampling(every_s=every_s), times_ms) == expected


def test_start_and_end_count_from_the_first_frame() -> None:
    times = [0, 100, 200, -HOUR, 50 - HOUR, 150, 250]
    assert chosen(Sampling(start_s=0), times) == [0, 1, 2, 5, 6]
    assert chosen(Sampling(start_s=0.1, end_s=0.2), times) == [1, 2, 5]
    chooser = FrameChooser(Sampling())
    for time in times:
        chooser.fate(START + round(time * MS))
    assert chooser.goes_back == (3, (HOUR + 200) * MS)


def test_every_frame_has_one_fate() -> None:
    chooser = FrameChooser(Sampling(0.2, 0.8, 0.2, 2))
    assert Counter(chooser.fate(START + number * 100 * MS) for number in range(12)) == {
        Fate.OUTSIDE: 5,
        Fate.CHOSEN: 2,
        Fate.SKIPPED: 1,
        Fate.AFTER_LIMIT: 4,
    }
