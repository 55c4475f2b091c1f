"""Which frames are chosen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sinkprune.jetson.bags.answers_file import FrameResult, open_journal
from sinkprune.jetson.replay import FrameChooser, Sampling

MS = 1_000_000
START = 1_700_000_000_000_000_007


def chosen(sampling: Sampling, times_ms: list[float]) -> list[int]:
    chooser = FrameChooser(sampling)
    return [number for number, time in enumerate(times_ms) if chooser.chooses(START + round(time * MS))]


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


HOUR = 3_600_000.0


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
        (1, [0, -0.001, 0], [0]),
    ],
)
def test_periods_go_on_after_a_clock_that_is_set_back(
    every_s: float, times_ms: list[float], expected: list[int]
) -> None:
    assert chosen(Sampling(every_s=every_s), times_ms) == expected
    # Without periods no frame is lost to its time.
    for sampling in (Sampling(), Sampling(end_s=2 * HOUR)):
        assert chosen(sampling, times_ms) == list(range(len(times_ms)))
    assert chosen(Sampling(limit=3), times_ms) == [0, 1, 2]


def test_start_and_end_count_from_the_first_frame() -> None:
    times = [0, 100, 200, -HOUR, 50 - HOUR, 150, 250]
    assert chosen(Sampling(start_s=0), times) == [0, 1, 2, 5, 6]
    assert chosen(Sampling(start_s=0.1, end_s=0.2), times) == [1, 2, 5]
    chooser = FrameChooser(Sampling())
    for time in times:
        chooser.chooses(START + round(time * MS))
    assert chooser.goes_back == (3, (HOUR + 200) * MS)


RESULT = FrameResult(0, 1, text="yes", tokens_per_layer=(3, 2), ms={"vision": 1.5}, overlay=b"jpeg")


WHOLE = json.loads(RESULT.line())


@pytest.mark.parametrize(
    "damaged",
    [
        *(WHOLE | field for field in ({"text": 5}, {"tokens_per_layer": []}, {"prompt_tokens": 2**32})),
        *(WHOLE | field for field in ({"ms": {"other": 1.0}}, {"overlay": 5})),
        {name: WHOLE[name] for name in WHOLE if name != "overlay"},
        [WHOLE],
    ],
)
def test_a_damaged_line_ends_the_results(damaged: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.mcap"
    with pytest.raises(ZeroDivisionError), open_journal(out, {"a": 1}) as journal:
        journal.add(RESULT)
        with journal.path.open("ab") as file:
            file.write(json.dumps(damaged).encode() + b"\n" + RESULT.line())
        1 / 0  # noqa: B018
    with open_journal(out, {"a": 1}) as journal:
        assert list(journal.results()) == [RESULT] and journal.count == 1
        journal.add(replace(RESULT, number=1))
        assert [result.number for result in journal.results()] == [0, 1]
