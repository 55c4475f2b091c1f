"""The journal of a replay, after damage to the file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sinkprune.jetson.bags.answers_file import FrameResult, open_journal
from sinkprune.jetson.bags.replay import Fate, summarise

RESULT = FrameResult(0, 1, text="yes", tokens_per_layer=(3, 2), ms={"vision": 1.5}, overlay=b"jpeg")


@pytest.mark.parametrize(
    "damage",
    [
        lambda found: found | {"text": 5},
        lambda found: found | {"tokens_per_layer": []},
        lambda found: found | {"tokens_per_layer": 5},
        lambda found: found | {"tokens_per_layer": [-1]},
        lambda found: found | {"prompt_tokens": 2**32},
        lambda found: found | {"time_ns": -1},
        lambda found: found | {"ms": {"other": 1.0}},
        lambda found: found | {"overlay": 5},
        lambda found: found | {"overlay": "x"},
        lambda found: found | {"frame_id": "\ud800"},
        lambda found: {name: found[name] for name in found if name != "overlay"},
        lambda found: [found],
    ],
)
def test_a_damaged_line_ends_the_results(damage: Callable[[Any], Any], tmp_path: Path) -> None:
    out = tmp_path / "out.mcap"
    with pytest.raises(ZeroDivisionError), open_journal(out, {"a": 1}) as journal:
        journal.add(RESULT)
        with journal.path.open("ab") as file:
            file.write(json.dumps(damage(json.loads(RESULT.line()))).encode() + b"\n" + RESULT.line())
        1 / 0  # noqa: B018
    with open_journal(out, {"a": 1}) as journal:
        assert list(journal.results()) == [RESULT] and journal.count == 1
        journal.add(replace(RESULT, number=1))
        assert [result.number for result in journal.results()] == [0, 1]


def test_deep_json_in_a_journal_is_rejected(tmp_path: Path) -> None:
    out = tmp_path / "out.mcap"
    with open_journal(out, {"a": 1}) as journal, journal.path.open("ab") as file:
        file.write(b"[" * 100_000 + b"\n")
        file.flush()
        assert list(journal.results()) == []


def test_a_report_lists_the_first_failures_only() -> None:
    results = [RESULT, *(FrameResult(number, 1, failure="no picture") for number in range(1, 10_101))]
    summary = summarise(results, Counter({Fate.CHOSEN: len(results)}))
    assert summary.frames.failed == 10_100 and len(summary.failures) == 10_000
