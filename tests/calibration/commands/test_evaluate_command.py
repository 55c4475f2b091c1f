"""`sinkprune-evaluate` from end to end on a small bundle and real pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from skimage import data

from sinkprune.calibration.evaluation.statistics import wilson
from sinkprune.runtime.pipeline import Pipeline
from support.programs.commands import assert_refused, interrupt_after, run, succeed, without_notes, wrote

Bundles = Callable[..., Path]
BUDGETS = ("--budgets", "retain-64,retain-32")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory, pipeline: Callable[..., Pipeline]) -> Path:
    """Four questions about two photos; the model's weights are random, so two answers are its own, unpruned."""
    folder = tmp_path_factory.mktemp("task")
    lines = []
    for name in ("coffee", "astronaut"):
        photo = Image.fromarray(getattr(data, name)()).resize((200, 150))
        photo.save(folder / f"{name}.png")
        said = pipeline("gqa-112").generate(photo, "What is this?", max_new_tokens=8).text
        lines.append({"image": f"{name}.png", "question": "What is this?", "answer": said, "kind": "known"})
        lines.append(lines[-1] | {"question": "Is it a dog?", "answer": "no dog at all", "kind": "unknown"})
    path = folder / "task.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_report_the_plot_and_the_answers(bundle: Bundles, task: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("report.json", "plot.png", "answers.jsonl")}
    outcome = succeed(
        "sinkprune-evaluate",
        *(bundle("gqa-112"), "--data", task, *BUDGETS, "--json", files["report.json"]),
        *("--plot", files["plot.png"], "--answers", files["answers.jsonl"]),
    )
    assert without_notes(outcome.stderr) == wrote(files["answers.jsonl"], files["plot.png"], files["report.json"])
    rows = [line.split() for line in outcome.stdout.splitlines()]
    none = next(row for row in rows if row[:2] == ["none", "64.0"])
    low, high = wilson(2, 4)
    assert none[-6:] == ["50.0", f"({100 * low:.1f}", "to", f"{100 * high:.1f})", "100.0", "%"]
    assert [row[0] for row in rows if row[1:2] == ["sinkpruner"]] == ["retain-64", "retain-32"]
    report = json.loads(files["report.json"].read_text())
    assert (report["task"], report["questions"], report["unreachable"]) == ("task.jsonl", 4, [])
    assert report["pictures"] == 2
    # The photos are 4:3.
    assert ["4 questions" in line for line in report["warnings"]] == [True, False, True]
    assert "Small sample: 2 pictures." in report["warnings"][1] and "75 %" in report["warnings"][2]
    assert "\n".join(report["warnings"]) in outcome.stdout
    assert (report["none"]["accuracy"], report["none"]["relative"]) == (0.5, 1.0)
    assert report["none"]["by_kind"]["known"] == {"accuracy": 1.0, "ci95": pytest.approx([0.34238, 1]), "count": 2}
    assert report["none"]["mean_visual_tokens"] == 64
    for budget in report["methods"]["sinkpruner"].values():
        assert budget["relative"] == budget["accuracy"] / 0.5
        assert budget["mean_visual_tokens"] < 20
        assert 0 < budget["ttft_ms"]["median"] <= budget["ttft_ms"]["p95"]
    answers = [json.loads(line) for line in files["answers.jsonl"].read_text().splitlines()]
    assert len(answers) == 4 * 3 and set(answers[0]) == {"id", "method", "budget", "reply", "right"}
    base = [answer["right"] for answer in answers if answer["budget"] == "none"]
    assert base == [True, False, True, False]
    with Image.open(files["plot.png"]) as plot:
        assert plot.width > 1000
    assert sorted(tmp_path.iterdir()) == sorted(files.values())


@pytest.mark.parametrize(
    ("options", "shown", "pixels"),
    [
        ((), "", None),
        (("--blind",), "replaced by a grey one", lambda photo: Image.new("RGB", photo.size, (128, 128, 128))),
        (("--fit", "stretch"), "--fit stretch", lambda photo: photo.resize((112, 112), Image.Resampling.BICUBIC)),
        (("--plant-outliers",), "outliers planted", None),
    ],
)
def test_options_change_what_the_model_sees(
    options: tuple[str, ...],
    shown: str,
    pixels: Callable[[Image.Image], Image.Image] | None,
    bundle: Bundles,
    task: Path,
    tmp_path: Path,
    pipeline: Callable[..., Pipeline],
) -> None:
    files = ("--json", tmp_path / "report.json", "--answers", tmp_path / "a.jsonl")
    words = (bundle("gqa-112"), "--data", task, "--budgets", "none", "--limit", 3, *files, *options)
    outcome = succeed("sinkprune-evaluate", *words)
    assert shown in outcome.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    flags = "--blind" in options, "--plant-outliers" in options, "stretch" if "stretch" in options else None
    assert (report["blind"], report["planted_outliers"], report["fit"]) == flags
    # The known answers are those of the pictures and of the tower as they are.
    assert (report["none"]["by_kind"]["known"]["accuracy"] == 1) == (not options)
    first, _, third = (json.loads(line)["reply"] for line in (tmp_path / "a.jsonl").read_text().splitlines())
    if pixels:
        with Image.open(task.parent / "coffee.png") as photo:
            seen = pixels(photo)
        assert first == pipeline("gqa-112").generate(seen, "What is this?", max_new_tokens=8).text
    assert first == third or "--blind" not in options


def test_outputs_are_checked_before_anything_runs(bundle: Bundles, task: Path, tmp_path: Path) -> None:
    arguments = (bundle("gqa-112"), "--data", task)
    around = task.parent / ".." / task.parent.name
    for words, *said in (
        (("--answers", tmp_path / "x.json"), ".json", ".jsonl"),
        (("--answers", around / task.name), "overwritten, and it is read"),
        (("--plot", around / "coffee.png"), "overwritten, and it is read"),
        (("--json", bundle("gqa-112") / "x.json"), "lies in"),
    ):
        assert_refused(run("sinkprune-evaluate", *arguments, *words), *said)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [("sinkprune-evaluate",), ("sinkprune-calibrate", "attention")])
def test_a_question_that_is_too_long_is_refused_before_the_first_is_asked(
    words: tuple[str, ...], bundle: Bundles, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate(*arguments: object, **options: object) -> None:
        raise AssertionError("a question was asked")

    monkeypatch.setattr(Pipeline, "generate", generate)
    lines = [json.loads(line) for line in task.read_text().splitlines()]
    lines.append(lines[0] | {"question": "why " * 2000})
    path = write_lines(tmp_path, task, lines)
    asked = ("--data", path, "--budgets", "retain-64", "--limit", 99, "--json", tmp_path / "x.json")
    outcome = run(*words, bundle("gqa-112"), *asked)
    assert_refused(outcome, f"error: '{path}', line {len(lines)}: the prompt is too long")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("limit", "expected"), [(6, 6), (20, 8)])
def test_answers_are_as_long_as_engines_allow(
    limit: int, expected: int, bundle: Bundles, task: Path, tmp_path: Path
) -> None:
    build = ("--target", "onnxruntime", "--max-new-tokens", limit)
    succeed("sinkprune-build", bundle("gqa-112"), "-o", tmp_path / "engines", *build)
    command = ("sinkprune-evaluate", tmp_path / "engines", "--data", task, "--budgets", "none", "--limit", 1)
    assert json.loads(succeed(*command, "--json").stdout)["max_new_tokens"] == expected
    assert_refused(run(*command, "--max-new-tokens", limit + 1), f"more than the {limit} the engines were built for")


@pytest.mark.parametrize("complete", [0, 2])
def test_an_interrupt_reports_the_questions_answered_so_far(
    complete: int, bundle: Bundles, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Three combinations, a warm-up of each, and one answer to the next question.
    generate = Pipeline.generate
    monkeypatch.setattr(Pipeline, "generate", interrupt_after(3 * (1 + complete) + 1, generate))
    outputs = ("--json", tmp_path / "x.json", "--answers", tmp_path / "x.jsonl")
    outcome = run("sinkprune-evaluate", bundle("gqa-112"), "--data", task, *BUDGETS, *outputs)
    assert outcome.code == 130
    if not complete:
        assert without_notes(outcome.stderr) == "interrupted; no whole question was measured, so nothing was kept.\n"
        assert list(tmp_path.iterdir()) == []
        return
    said = "the report counts the first 2 of 4 questions."
    written = wrote(tmp_path / "x.jsonl", tmp_path / "x.json")
    assert without_notes(outcome.stderr) == f"{written}interrupted; {said}\n"
    report = json.loads((tmp_path / "x.json").read_text())
    assert report["questions"] == report["none"]["by_kind"]["known"]["count"] * 2 == 2
    assert (report["interrupted"], report["warnings"][0]) == (said, f"Interrupted: {said}")
    assert report["warnings"][0] in outcome.stdout
    assert len((tmp_path / "x.jsonl").read_text().splitlines()) == 2 * 3
    # What was measured before stays.
    monkeypatch.setattr(Pipeline, "generate", interrupt_after(3 * 2 + 1, generate))
    outcome = run("sinkprune-evaluate", bundle("gqa-112"), "--data", task, *BUDGETS, *outputs)
    assert outcome.code == 130 and "Earlier files stay; these results are in '" in outcome.stderr
    assert json.loads((tmp_path / "x.json").read_text())["questions"] == 2
    assert json.loads((tmp_path / "x.interrupted.json").read_text())["questions"] == 1
    assert len((tmp_path / "x.interrupted.jsonl").read_text().splitlines()) == 3


def test_kinds_are_shown_as_they_are_called(bundle: Bundles, task: Path, tmp_path: Path) -> None:
    """Neither rich's markup nor a terminal's escape sequences have a meaning in a stranger's words."""
    kinds = ("[red]x", "[/]", "\x1b[2Jy", "[link=file:///]z")
    lines = [json.loads(line) for line in task.read_text().splitlines()]
    path = write_lines(tmp_path, task, [line | {"kind": kind} for line, kind in zip(lines, kinds, strict=True)])
    outcome = succeed("sinkprune-evaluate", bundle("gqa-112"), "--data", path, "--budgets", "none")
    for shown in ("[red]x ", "[/] ", "\\x1b[2Jy ", "[link=file:///]z "):
        assert shown in outcome.stdout
    assert "\x1b" not in outcome.stdout


def write_lines(folder: Path, task: Path, lines: list[dict[str, Any]]) -> Path:
    """Write questions about the pictures of `task` to a file in another folder."""
    path = folder / "lines.jsonl"
    path.write_text("".join(f"{json.dumps(line | {'image': str(task.parent / line['image'])})}\n" for line in lines))
    return path
