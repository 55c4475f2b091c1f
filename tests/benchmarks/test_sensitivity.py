"""The benchmark of prune layers and of the sanitizer's split, on a small checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import sensitivity
from sensitivity_methods.variants import SHIFTS, moved_layers
from sinkprune.export import methods
from support.models.tasks import write_task
from support.programs.commands import Outcome, assert_refused


@pytest.fixture(autouse=True)
def methods_of_the_package_alone() -> Iterator[None]:
    """What the benchmark adds to the places of methods is taken away again."""
    before = [*methods.__path__]
    yield
    methods.__path__[:] = before


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """Three questions about two photos."""
    return write_task(tmp_path, [(name, "What is this?") for name in ("a.png", "a.png", "b.png")])


def test_layers_move_by_one_where_there_is_room() -> None:
    assert {shift: moved_layers(shift, 32) for shift in SHIFTS} == {
        "all-earlier": (1, 5, 14),
        "first-earlier": (1, 6, 15),
        "second-earlier": (2, 5, 15),
        "third-earlier": (2, 6, 14),
        "first-later": (3, 6, 15),
        "second-later": (2, 7, 15),
        "third-later": (2, 6, 16),
        "all-later": (3, 7, 16),
    }
    # (1, 2, 4)
    assert (moved_layers("second-earlier", 8), moved_layers("first-later", 8)) == (None, None)
    assert (moved_layers("all-earlier", 8), moved_layers("all-later", 8)) == ((0, 1, 3), (2, 3, 5))
    # (0, 1, 3) of 6
    assert moved_layers("first-earlier", 6) is None
    assert moved_layers("third-later", 6) == (0, 1, 4)


@pytest.mark.slow
def test_every_variant_keeps_the_mean_and_is_compared_with_the_method(
    checkpoint: Callable[[str], Path], task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = tmp_path / "told.json"
    words = ["--checkpoint", checkpoint("gqa-112"), "--data", task, "--budgets", "retain-192", "--json", told]
    assert sensitivity.main([*map(str, words)]) == 0
    found = {variant["method"]: variant for variant in json.loads(told.read_text())}
    own = found["sinkpruner-paper"]
    assert (own["layers"], own["reserve"], own["diverse"], own["stages"]) == ([1, 2, 4], 21, 21, [38, 21, 15])
    assert {name: variant["layers"] for name, variant in found.items() if name in SHIFTS} == {
        "all-earlier": [0, 1, 3],
        "first-earlier": [0, 2, 4],
        "third-earlier": [1, 2, 3],
        "second-later": [1, 3, 4],
        "third-later": [1, 2, 5],
        "all-later": [2, 3, 5],
    }
    shares = {name: (v["reserve"], v["diverse"]) for name, v in found.items() if name.startswith("salient-")}
    assert shares == {
        "salient-0": (0, 42),
        "salient-25": (10, 32),
        "salient-75": (31, 11),
        "salient-100": (42, 0),
    }
    for variant in found.values():
        assert variant["mean_visual_tokens"] == pytest.approx(own["mean_visual_tokens"], abs=0.5)
        assert all(one >= other for one, other in zip([43, *variant["stages"]], variant["stages"], strict=False))
        assert variant["change"] == pytest.approx(variant["accuracy"] - own["accuracy"])
    printed = capsys.readouterr().out
    assert "3 questions about 2 pictures" in printed
    assert "| as they are (1, 2, 4) | 21 + 21; 38, 21, 15 |" in printed
    assert "| all later (2, 3, 5) |" in printed and "| 50 %, as it is |" in printed
    assert len([line for line in printed.splitlines() if line.startswith("| ")]) == 2 + 7 + 5


def test_what_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = sensitivity.main(["--checkpoint", str(tmp_path)])
    assert_refused(Outcome(code, *capsys.readouterr()), "config.json")
