"""`sinkprune-calibrate confidence` from end to end, on the pocket model and on a small bundle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sinkprune import Answer, Pipeline, read_thresholds
from sinkprune.calibration.commands.confidence import describe_steps
from sinkprune.calibration.confidence.report import CurvePoint
from sinkprune.demo.write_scenes import write_scenes
from sinkprune.export.command import main as export
from support.programs.commands import assert_refused, run
from support.references.answer_encoders import POCKET

COMMAND = ("sinkprune-calibrate", "confidence")


@pytest.fixture(scope="module")
def pocket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pocket model and questions about three scenes."""
    folder = tmp_path_factory.mktemp("pocket")
    budgets = "retain-32+from-retain-64,retain-64"
    assert export([str(POCKET), "-o", str(folder / "bundle"), "--budgets", budgets]) == 0
    write_scenes(folder, 3)
    return folder


def test_thresholds_of_the_pocket_model(pocket: Path, tmp_path: Path) -> None:
    files = ("--json", tmp_path / "report.json", "--thresholds", tmp_path / "thresholds.json")
    data = ("--data", pocket / "scenes.jsonl", "--share", "0.9", "--threads", 1)
    outcome = run(*COMMAND, pocket / "bundle", *data, *files)
    assert outcome.code == 0, outcome.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert [*report["budgets"]] == ["retain-32+from-retain-64", "retain-64", "none"]
    assert report["ladders"] == [["retain-32+from-retain-64", "retain-64"]]
    assert "share a sanitizer, and with it the first decoder layers: retain-32" in outcome.stdout
    assert [fixed["resumed_ms"] is None for fixed in report["budgets"].values()] == [True, False, True]
    assert report["budgets"]["none"]["accuracy"] > 0.8 and report["budgets"]["none"]["relative"] == 1
    assert [point["share"] for point in report["curve"]] == sorted({1, 0.99, 0.98, 0.97, 0.95, 0.9}, reverse=True)
    for point in report["curve"]:
        budgets = [*point["reached"]]
        assert budgets == [*point["least"]] and point["least"][budgets[-1]] == 0
        shares = [*point["reached"].values()]
        assert shares[0] == 1 and shares == sorted(shares, reverse=True)
        # The thresholds reach the share on their own questions.
        assert point["same_questions_accuracy"] >= point["share"] * report["budgets"]["none"]["accuracy"] - 1e-9
    assert report["chosen"] == next(point for point in report["curve"] if point["share"] == 0.9)
    assert any("Small sample" in warning for warning in report["warnings"])
    thresholds = read_thresholds(tmp_path / "thresholds.json")
    assert thresholds.least == report["chosen"]["least"]
    pipe = Pipeline.load(pocket / "bundle", threads=1)
    pipe.thresholds = thresholds
    answer = pipe.generate(pocket / "scene-0.png", "Is there a red ring?", choice=["yes", "no"], budget="auto")
    assert answer.budget in thresholds.least


@pytest.mark.parametrize("complete", [0, 5])
def test_an_interrupt_reports_the_questions_answered_so_far(
    complete: int, pocket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Three budgets and auto: each once as a warm-up, and then for each question.
    left, generate = iter(range(4 * (1 + complete) + 1)), Pipeline.generate

    def interrupted(*arguments: Any, **options: Any) -> Answer:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return generate(*arguments, **options)

    monkeypatch.setattr(Pipeline, "generate", interrupted)
    files = ("--json", tmp_path / "report.json", "--thresholds", tmp_path / "thresholds.json")
    outcome = run(*COMMAND, pocket / "bundle", "--data", pocket / "scenes.jsonl", *files)
    assert outcome.code == 130
    if not complete:
        assert outcome.stderr == "interrupted; no whole question was measured, so nothing was kept.\n"
        assert list(tmp_path.iterdir()) == []
        return
    lines = len((pocket / "scenes.jsonl").read_text().splitlines())
    none = "No thresholds were written: they need all questions."
    assert f"wrote {tmp_path}/report.json\n" in outcome.stderr
    assert outcome.stderr.endswith(f"interrupted; the report counts the first 5 of {lines} questions. {none}\n")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["questions"] == 5 and report["warnings"][0].startswith(
        "Interrupted: the report counts the first 5 "
    )
    assert none in report["warnings"][0]
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    # Earlier thresholds stay.
    (tmp_path / "thresholds.json").write_text("precious")
    left = iter(range(4 * 3 + 1))
    outcome = run(*COMMAND, pocket / "bundle", "--data", pocket / "scenes.jsonl", *files)
    assert outcome.code == 130 and "report.interrupted.json'.\n" in outcome.stderr
    assert (tmp_path / "thresholds.json").read_text() == "precious"
    assert not (tmp_path / "thresholds.interrupted.json").exists()
    written = json.loads((tmp_path / "report.interrupted.json").read_text())
    assert written["questions"] == 2 and written["interrupted"].startswith("the report counts the first 2 of ")


@pytest.fixture
def asked(tmp_path: Path, photo: Image.Image) -> Callable[..., Path]:
    """Return a function that writes lines about one photo to a file of questions."""
    photo.save(tmp_path / "photo.png")

    def write(*lines: dict[str, object]) -> Path:
        full = [{"image": "photo.png", "question": "Is there a cup?", "answer": "yes", **line} for line in lines]
        (tmp_path / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in full))
        return tmp_path / "q.jsonl"

    return write


def test_lists_of_the_data_and_of_the_command(bundle: Callable[..., Path], asked: Callable[..., Path]) -> None:
    path = bundle("gqa-112", "fp32", ("retain-64",))
    data = asked({"answer": "a"}, {"answer": "c", "choice": ["a", "c"]}, {"answer": "b"})
    words = (path, "--data", data, "--choice", "a", "--choice", "b", "--threads", 1)
    outcome = run(*COMMAND, *words, "--json")
    assert outcome.code == 0, outcome.stderr
    report = json.loads(outcome.stdout)
    assert (report["questions"], report["pictures"], report["folds"]) == (3, 1, 3)
    assert "a part of the picture in 3 of 3 questions" in report["warnings"][-1]
    assert any("Small sample: 1 picture" in warning for warning in report["warnings"])
    asks_again = len(report["chosen"]["least"]) > 1
    assert any("asks none again" in warning for warning in report["warnings"]) != asks_again
    assert "cross-validated over 3 parts of the questions" in run(*COMMAND, *words).stdout


@pytest.mark.parametrize(
    ("lines", "words", "message"),
    [
        ([{}], (), "has no closed list"),
        ([{}], ("--choice", "no", "--choice", "maybe"), "expected 'yes' in: no, maybe"),
        ([{"choice": ["no", "maybe"]}], (), "expected 'yes' in: no, maybe"),
        ([{"choice": ["yes"]}], (), "expected 2 to 256"),
        ([{"choice": ["yes", "no"], "options": ["yes", "no"]}], (), "'choice' and 'options'"),
        ([{"choice": ["yes", "no"]}], ("--share", "1.1"), "--share is 1.1"),
        ([{"choice": ["yes", "no"]}], ("--budgets", "none"), "the only budget"),
        ([{"choice": ["yes", "no"]}], ("--budgets", "retain-9"), "retain-9"),
        ([{"choice": ["yes", "no"]}], ("--method", "fastv"), "no method 'fastv'"),
        ([{"choice": ["yes", "no"]}], ("--choice", "yes"), "choice has 1 different text of 1"),
        ([{"choice": ["yes", "no"]}], ("--data", "scenes"), "the test set"),
    ],
)
def test_wrong_data_and_options_are_refused(
    lines: list[dict[str, object]],
    words: tuple[str, ...],
    message: str,
    bundle: Callable[..., Path],
    asked: Callable[..., Path],
) -> None:
    path = bundle("gqa-112", "fp32", ("retain-64",))
    assert_refused(run(*COMMAND, path, "--data", asked(*lines), *words), message)


def test_a_question_that_is_too_long_is_refused_before_the_first_is_asked(
    bundle: Callable[..., Path], asked: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate(*arguments: object, **options: object) -> None:
        raise AssertionError("a question was asked")

    monkeypatch.setattr(Pipeline, "generate", generate)
    path = bundle("gqa-112", "fp32", ("retain-64",))
    line = {"answer": "a", "choice": ["a", "b"]}
    lines = asked(line, {**line, "question": "why " * 2000, "id": "long"})
    assert_refused(run(*COMMAND, path, "--data", lines), f"'{lines}', line ", "too long")


def test_steps_in_words() -> None:
    least = {"a": 0.97, "b": 0.99999, "c": 1.0, "none": 0.0}
    point = CurvePoint(1, (1, 1), 1, 0.99, least, {}, 1, 1)
    assert describe_steps(point) == "a below 0.970, b below 0.99999, c below 1, none"
