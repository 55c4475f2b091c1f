"""`sinkprune-calibrate evidence` from end to end: means of varying counts meet those of budgets."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.calibration.tasks import load_task
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.plans import Plan
from sinkprune.demo.write_scenes import write_scenes
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from support.programs.commands import assert_refused, run

COMMAND = ("sinkprune-calibrate", "evidence")
BUDGETS = ("retain-192", "retain-64")


@pytest.fixture(scope="module")
def exported(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that is not calibrated, next to questions about five scenes."""
    folder = tmp_path_factory.mktemp("evidence")
    export_bundle(ExportRequest(str(checkpoint("gqa-112")), BUDGETS, ("sinkpruner", "occamtoken")), folder / "bundle")
    write_scenes(folder, 5, "validation")
    return folder


@pytest.fixture
def own(exported: Path, tmp_path: Path) -> Path:
    """A copy of the bundle that may be changed."""
    return Path(shutil.copytree(exported / "bundle", tmp_path / "bundle"))


def plans_of(root: Path) -> dict[str, Plan]:
    return read_bundle(root).manifest.plans["occamtoken"]


def tokens_per_layer(pipe: Pipeline, data: Path, budget: str) -> list[list[int]]:
    """The visual tokens of each layer, for each question of a file."""
    counts = []
    for item in load_task(str(data)):
        options = {"method": "occamtoken", "budget": budget, "max_new_tokens": 1}
        answer = pipe.generate(item.load_image(), item.question.prompt, **options)
        counts.append(answer.tokens_per_layer)
    return counts


def test_the_mean_over_the_pictures_is_the_budgets(own: Path, exported: Path, tmp_path: Path) -> None:
    data, report = exported / "scenes.jsonl", tmp_path / "found.json"
    before = read_bundle(own)
    outcome = run(*COMMAND, own, "--data", data, "--json", report)
    assert outcome.code == 0, outcome.stderr
    found = json.loads(report.read_text("utf-8"))
    after = read_bundle(own)
    after.verify()
    assert found["sha256"] == after.sha256 != before.sha256
    assert after.manifest.graphs == before.manifest.graphs and after.manifest.files == before.manifest.files
    assert after.manifest.plans["sinkpruner"] == before.manifest.plans["sinkpruner"]
    assert found["questions"] == len(load_task(str(data))) and found["pictures"] == 5

    pipe = Pipeline.load(own)
    layers = after.manifest.language_model.num_layers
    for budget in BUDGETS:
        plan, own_report = after.manifest.plans["occamtoken"][budget], found["budgets"][budget]
        assert plan.evidence is not None
        assert list(plan.evidence.thresholds or ()) == own_report["thresholds"]
        sink = pipe.generate(Image.new("RGB", (64, 64)), "What?", budget=budget, max_new_tokens=1)
        assert own_report["aimed_visual_tokens"] == pytest.approx(sum(sink.tokens_per_layer) / layers, abs=0.5)
        assert abs(own_report["mean_visual_tokens"] - own_report["aimed_visual_tokens"]) <= 0.5
        # What the report says is what requests keep.
        counts = tokens_per_layer(pipe, data, budget)
        means = [sum(own) / layers for own in counts]
        assert sum(means) / len(means) == pytest.approx(own_report["mean_visual_tokens"], abs=1e-9)
        # The first test meets its own aim.
        assert sum(own[0] for own in counts) / len(counts) == pytest.approx(plan.evidence.aims[0].of(64), abs=0.5)
        spread = own_report["visual_tokens"]
        assert (spread["min"], spread["max"]) == (min(means), max(means))
        assert spread["min"] < spread["median"] < spread["max"]


def test_evaluate_reports_the_distribution_and_the_aim(own: Path, exported: Path, tmp_path: Path) -> None:
    data, report = exported / "scenes.jsonl", tmp_path / "accuracy.json"
    # The calibration and the evaluation are of the same questions, so the means are the same.
    assert run(*COMMAND, own, "--data", data, "--budgets", "retain-64", "--json", tmp_path / "found.json").code == 0
    found = json.loads((tmp_path / "found.json").read_text("utf-8"))["budgets"]["retain-64"]
    outcome = run("sinkprune-evaluate", own, "--data", data, "--budgets", "retain-64", "--json", report)
    assert outcome.code == 0, outcome.stderr
    methods = json.loads(report.read_text("utf-8"))["methods"]
    varying, fixed = methods["occamtoken"]["retain-64"], methods["sinkpruner"]["retain-64"]
    for key in ("aimed_visual_tokens", "visual_tokens"):
        assert varying[key] == found[key]
    assert varying["mean_visual_tokens"] == pytest.approx(found["mean_visual_tokens"])
    assert fixed["aimed_visual_tokens"] is None
    assert set(fixed["visual_tokens"].values()) == {fixed["mean_visual_tokens"]}
    line = f"occamtoken at retain-64: {varying['mean_visual_tokens']:.1f} visual tokens a layer (aim "
    assert line in outcome.stdout and "sinkpruner at retain-64:" not in outcome.stdout
    # The other budget was not calibrated.
    assert_refused(run("sinkprune-evaluate", own, "--data", data, "--limit", 1), "calibrate evidence", "'retain-192'")


def test_what_becomes_of_the_bundle_is_told(own: Path, exported: Path) -> None:
    words = (*COMMAND, own, "--data", exported / "scenes.jsonl", "--limit", 2)
    first, again = run(*words, "--budgets", "retain-64"), run(*words)
    assert f"{own}: added the thresholds of retain-64\nsha256 " in first.stdout
    assert f"{own}: added the thresholds of retain-192; replaced the thresholds of retain-64\nsha256 " in again.stdout
    assert "make this bundle's engines and thresholds again" in again.stdout
    assert run(*words, "--dry-run").stdout.endswith(f"{own}: unchanged, because of --dry-run\n")


def test_a_dry_run_changes_nothing(own: Path, exported: Path) -> None:
    before = read_bundle(own).sha256
    outcome = run(*COMMAND, own, "--data", exported / "scenes.jsonl", "--limit", 3, "--dry-run")
    assert outcome.code == 0 and "retain-64" in outcome.stdout
    assert read_bundle(own).sha256 == before
    assert all(plan.evidence and plan.evidence.thresholds is None for plan in plans_of(own).values())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--method", "sinkpruner"), ("whose counts vary", "it holds occamtoken")),
        (("--method", "tome"), ("holds no method 'tome'",)),
        (("--budgets", "none"), ("'none' prunes nothing",)),
        (("--budgets", "retain-32"), ("holds no budget 'retain-32'",)),
        (("--data", "scenes"), ("the test set",)),
    ],
)
def test_wrong_options_are_refused(options: tuple[str, ...], said: tuple[str, ...], exported: Path) -> None:
    root = exported / "bundle"
    assert_refused(run(*COMMAND, root, "--data", exported / "scenes.jsonl", *options), *said)
    assert all(plan.evidence and plan.evidence.thresholds is None for plan in plans_of(root).values())


def test_a_question_that_is_too_long_is_refused_before_the_first_is_asked(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pipeline, "generate", None)
    long = exported / "long.jsonl"
    lines = (exported / "scenes.jsonl").read_text().splitlines()
    line = {"image": json.loads(lines[0])["image"], "question": "why " * 2000, "answer": "x"}
    long.write_text("\n".join([*lines, json.dumps(line)]))
    said = f"error: '{long}', line {len(lines) + 1}: the prompt is too long"
    assert_refused(run(*COMMAND, exported / "bundle", "--data", long), said)


def test_a_bundle_without_such_a_method_is_refused(bundle: Callable[..., Path], exported: Path) -> None:
    export = "Export one: sinkprune-export CHECKPOINT -o BUNDLE --methods sinkpruner,occamtoken."
    assert_refused(run(*COMMAND, bundle("gqa-112"), "--data", exported / "scenes.jsonl"), "it holds none", export)
