"""The order of files whose names have numbers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from sinkprune.contract.errors import UsageError
from sinkprune.contract.files.numbered_files import by_number


@pytest.mark.parametrize(
    "names",
    [
        ["frame0.png", "frame1.png", "frame2.png", "frame10.png", "frame11.png"],
        ["0.jpg", "9.png", "10.jpg", "100.bmp"],
        ["frame_8.png", "frame_09.png", "frame_0010.png"],
        ["ep2_cam1_9.png", "ep2_cam1_10.png", "ep2_cam2_1.png", "ep10_cam1_1.png"],
        ["1700000000.175304.png", "1700000000.211214.png", "1700000001.011214.png", "1700000010.000001.png"],
        ["1403636579763555584.png", "1403636579813555456.png"],
        ["2024-01-09_23-59-59.png", "2024-01-10_00-00-00.png", "2024-10-01_00-00-00.png"],
        ["rosbag2_9.mcap", "rosbag2_10.mcap"],
        ["shot.png", "shot1.png", "shot2.jpg", "shot10.png", "shots.png"],
        ["shot.png", "shot (9).png", "shot (10).png"],
        ["01.png", "1.png", "1b.png", "a.png"],
        ["frame.9", "frame.10"],
        ["v1.9_9.png", "v1.9_10.png"],
    ],
)
def test_numbers_count_as_numbers(names: list[str]) -> None:
    for seed in range(3):
        given = [Path("folder") / name for name in names]
        random.Random(seed).shuffle(given)
        assert [path.name for path in by_number(given)] == names


@pytest.mark.parametrize(
    "names",
    [["1700000000.5.png", "1700000000.25.png"], ["0.9.png", "0.10.png"], ["2024.9.30.png", "2024.10.1.png"]],
)
def test_an_unclear_point_is_refused(names: list[str]) -> None:
    with pytest.raises(UsageError, match=r"whose order is unclear.*equally many digits"):
        by_number([Path("frames") / name for name in [*names, "7.png"]])
    assert by_number([]) == []
