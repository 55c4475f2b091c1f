"""Which frames are chosen."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from sinkprune.jetson.bags.sampling import Fate, FrameChooser, Sampling

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


def test_frames_that_are_older_than_one_before_are_skipped() -> None:
    assert chosen(Sampling(every_s=0.1), [0, 250, 50, 100, 260, 310]) == [0, 1, 5]
    assert chosen(Sampling(), [0, 250, 50]) == [0, 1, 2]
    # Before the first frame of the topic
    assert chosen(Sampling(), [0, -50, 50]) == [0, 2]


def test_every_frame_has_one_fate() -> None:
    chooser = FrameChooser(Sampling(0.2, 0.8, 0.2, 2))
    assert Counter(chooser.fate(START + number * 100 * MS) for number in range(12)) == {
        Fate.OUTSIDE: 5,
        Fate.CHOSEN: 2,
        Fate.SKIPPED: 1,
        Fate.AFTER_LIMIT: 4,
    }
