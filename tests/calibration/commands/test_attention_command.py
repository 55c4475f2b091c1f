"""`sinkprune-calibrate attention` from end to end on small bundles and real pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.calibration.attention import AttentionObserver, observe
from sinkprune.calibration.commands import attention
from sinkprune.calibration.evaluation.replies import BASELINE, Combination
from sinkprune.calibration.tasks import load_task
from sinkprune.contract.bundle import read_bundle
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.methods.heads import read_heads
from sinkprune.export.source import ExportRequest
from support.models.chosen_heads import WITH_HEADS
from support.models.tasks import write_task
from support.programs.commands import assert_refused, run, without_notes, wrote

Bundles = Callable[..., Path]


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three questions about two photos."""
    asked = [("a.png", "What is this?"), ("a.png", "Which colour is it?"), ("b.png", "What is this?")]
    return write_task(tmp_path_factory.mktemp("questions"), asked)


def test_without_a_limit_it_takes_some_pictures_and_prints_a_note(
    bundle: Bundles, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert attention._PICTURES == 50
    monkeypatch.setattr(attention, "_PICTURES", 1)
    report = tmp_path / "attention.json"
    ask = ("sinkprune-calibrate", "attention", bundle("gqa-112"), "--data", questions, "--budgets", "retain-64")
    outcome = run(*ask, "--json", report)
    said = "takes the 2 questions about the first 1 pictures, of 3 questions; --limit 3 takes all\n"
    assert (outcome.code, without_notes(outcome.stderr)) == (0, said + wrote(report))
    assert json.loads(report.read_text())["questions"] == 2
    outcome = run(*ask, "--limit", 3, "--json")
    assert (outcome.code, without_notes(outcome.stderr)) == (0, "")
    assert json.loads(outcome.stdout)["questions"] == 3


def test_means_are_those_of_the_questions(bundle: Bundles, questions: Path, tmp_path: Path) -> None:
    files = tmp_path / "attention.json", tmp_path / "attention.png"
    chosen = "--data", questions, "--budgets", "retain-192,retain-64"
    outcome = run(
        "sinkprune-calibrate", "attention", bundle("gqa-112"), *chosen, "--json", files[0], "--plot", files[1]
    )
    assert (outcome.code, without_notes(outcome.stderr)) == (0, wrote(*files[::-1]))
    report = json.loads(files[0].read_text())
    assert (report["questions"], report["pictures"], report["outlier_per_mille"]) == (3, 2, 10)
    sample, unseen = report["warnings"]
    assert "2 pictures" in sample and "a part of the picture in 3 of 3 questions" in unseen
    assert sample in outcome.stdout and unseen in outcome.stdout
    assert {method: [*budgets] for method, budgets in report["methods"].items()} == {
        "sinkpruner": ["retain-192", "retain-64"]
    }
    watch = AttentionObserver()
    pipeline = Pipeline.load(bundle("gqa-112"), wrap=watch.wrap)
    runs = {
        BASELINE: report["none"],
        Combination("sinkpruner", "retain-64"): report["methods"]["sinkpruner"]["retain-64"],
    }
    for pair, told in runs.items():
        seen = [observe(pipeline, watch, item, pair) for item in load_task(str(questions))]
        assert told["rows"] == seen[0].rows
        assert told["sink_share"]["mean"] == pytest.approx(sum(s.sink_share for s in seen) / 3)
        assert told["salience_alone"]["mean"] == pytest.approx(sum(s.salience_alone for s in seen) / 3)
        assert told["layers"].keys() == {"1", "2", "4"}
        for layer, means in told["layers"].items():
            own = [s.layers[layer] for s in seen]
            for name in ("entropy", "entropy_of_mean", "sink_attention", "sink_share"):
                low, high = means[name]["ci95"]
                mean = sum(getattr(s, name) for s in own) / 3
                assert means[name]["mean"] == pytest.approx(mean)
                assert low <= mean + 1e-9 and mean <= high + 1e-9
            assert means["rows"] == own[0].rows
            assert f"{means['entropy']['mean']:.3f}" in outcome.stdout
    with Image.open(files[1]) as plot:
        assert plot.width > 500


def test_chosen_heads_go_from_the_command_to_a_plan(
    bundle: Bundles, checkpoint: Callable[[str], Path], questions: Path, tmp_path: Path
) -> None:
    heads = tmp_path / "heads.json"
    measure = ("sinkprune-calibrate", "attention", bundle("gqa-112"), "--data", questions, "--budgets", "none")
    outcome = run(*measure, "--heads", heads)
    assert outcome.code == 0, outcome.stderr
    assert outcome.stderr.endswith(wrote(heads))
    found = read_heads(heads)
    for layer, own in found.layers.items():
        (line,) = (line for line in outcome.stdout.splitlines() if line.startswith(f"layer {layer}: "))
        assert [int(head) for head in re.findall(r"(\d+) \(", line)] == list(own.chosen)
        assert f", of {len(own.question_dependence)}" in line
    for method in WITH_HEADS:
        chosen = ("--methods", method, "--budgets", "retain-64", "--heads", heads)
        exported = run("sinkprune-export", checkpoint("gqa-112"), "-o", tmp_path / method, *chosen)
        assert exported.code == 0, exported.stderr
        plan = read_bundle(tmp_path / method).manifest.plans[method]["retain-64"]
        assert plan.heads == {layer: own.chosen for layer, own in found.layers.items()}
    # With a report, the heads are the same, and stdout is JSON alone.
    again = run(*measure, "--heads", heads, "--json")
    assert json.loads(again.stdout)["questions"] == 3 and read_heads(heads) == found


def test_heads_need_own_questions_that_differ_and_the_cuts_of_sinkpruner(
    bundle: Bundles, checkpoint: Callable[[str], Path], questions: Path, tmp_path: Path
) -> None:
    heads = ("--heads", tmp_path / "heads.json")
    measure = ("sinkprune-calibrate", "attention")
    assert_refused(run(*measure, bundle("gqa-112"), *heads), "the test set")
    asked = ("--data", questions)
    assert_refused(run(*measure, bundle("gqa-112"), *asked, "--limit", 1, *heads), "all questions are the same")
    assert_refused(run(*measure, bundle("gqa-112"), *asked, "--heads", tmp_path / "heads.txt"), ".json")
    request = ExportRequest(str(checkpoint("gqa-112")), ("retain-192",), ("uniform",))
    export_bundle(request, tmp_path / "uniform")
    refused = run(*measure, tmp_path / "uniform", *asked, *heads)
    assert_refused(refused, "heads of layers 1, 2, 4", "cut after layers none", "--methods sinkpruner")
    assert not heads[1].exists()
