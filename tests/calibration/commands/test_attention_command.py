"""`sinkprune-calibrate attention` from end to end: on questions about photos, and on moments of a robot policy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sinkprune import Pipeline, Policy
from sinkprune.calibration.attention import AttentionObserver, observe
from sinkprune.calibration.commands import attention
from sinkprune.calibration.evaluation.replies import BASELINE, Combination
from sinkprune.calibration.tasks import load_task
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from support.models.tasks import write_task
from support.programs.commands import assert_refused, run, succeed, without_notes, wrote

Bundles = Callable[..., Path]
ATTENTION = ("sinkprune-calibrate", "attention")


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
    ask = (*ATTENTION, bundle("gqa-112"), "--data", questions, "--budgets", "retain-64")
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
    outcome = run(*ATTENTION, bundle("gqa-112"), *chosen, "--json", files[0], "--plot", files[1])
    assert (outcome.code, without_notes(outcome.stderr)) == (0, wrote(*files[::-1]))
    report = json.loads(files[0].read_text())
    assert (report["questions"], report["pictures"], report["outlier_per_mille"]) == (3, 2, 10)
    sample, unseen = report["warnings"]
    assert "2 pictures" in sample and "a part of the picture in 3 of 3 questions" in unseen
    assert [*report["methods"]["sinkpruner"]] == ["retain-192", "retain-64"]
    watch = AttentionObserver()
    pipeline = Pipeline.load(bundle("gqa-112"), wrap=watch.wrap)
    pruned = Combination("sinkpruner", "retain-64")
    for pair, told in ((BASELINE, report["none"]), (pruned, report["methods"]["sinkpruner"]["retain-64"])):
        seen = [observe(pipeline, watch, item, pair) for item in load_task(str(questions))]
        assert (told["rows"], told["layers"].keys()) == (seen[0].rows, {"1", "4"})
        for layer, means in told["layers"].items():
            own = [s.layers[layer] for s in seen]
            assert means["rows"] == own[0].rows
            assert f"{means['entropy']['mean']:.3f}" in outcome.stdout
            for name in ("entropy", "entropy_of_mean", "sink_attention", "sink_share"):
                low, high = means[name]["ci95"]
                mean = sum(getattr(s, name) for s in own) / 3
                assert means[name]["mean"] == pytest.approx(mean)
                assert low <= mean + 1e-9 and mean <= high + 1e-9
    with Image.open(files[1]) as plot:
        assert plot.width > 500


STATE = [0.5] * 5
MOMENTS = (
    (("a.png", "b.png"), "pick up the cup"),
    (("a.png", "b.png"), "put the red block into the box"),
    (("b.png", None), "pick up the cup"),
    (("c.png", "a.png"), "open the door"),
)


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path], photo: Image.Image, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small policy that is not calibrated, next to a file of moments."""
    root = tmp_path_factory.mktemp("policy")
    plans = ("prune-66.7", "prune-88.9"), ("sinkpruner", "random")
    export_bundle(ExportRequest(str(checkpoint("pi0")), *plans, max_images=2), root / "bundle")
    for number, name in enumerate(("a.png", "b.png", "c.png")):
        photo.crop((60 * number, 20, 60 * number + 240, 220)).save(root / name)
    lines = [{"cameras": list(names), "instruction": words, "state": STATE} for names, words in MOMENTS]
    (root / "moments.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return root


def test_shares_of_sink_tokens_are_those_of_all_cameras(folder: Path) -> None:
    """`random` keeps the sink token of one camera and not of another, so a camera that is left out shows."""
    options = ("--methods", "sinkpruner,random", "--budgets", "prune-66.7", "--json")
    outcome = succeed(*ATTENTION, folder / "bundle", "--data", folder / "moments.jsonl", *options)
    found, policy = json.loads(outcome.stdout), Policy.load(folder / "bundle")
    assert (found["questions"], found["pictures"], found["outlier_per_mille"]) == (4, 3, 10)
    for method in ("sinkpruner", "random"):
        means, shares, tokens, unequal = found["methods"][method]["prune-66.7"], [], [], False
        for names, words in MOMENTS:
            cameras = [None if name is None else folder / name for name in names]
            report = policy.act(cameras, words, STATE, method=method, budget="prune-66.7", steps=1)
            # One token of 64 is a sink token: that of the largest norm.
            marked = [kept.index.ravel() == np.argmax(kept.norms[0]) for kept in report.images]
            unequal |= len({own.any() for own in marked}) > 1
            shares.append(np.concatenate(marked).mean())
            tokens.append([sum(map(len, marked)), *report.tokens_per_layer])
        assert unequal == (method == "random")
        assert means["sink_share"]["mean"] == pytest.approx(np.mean(shares))
        rows, *layers = np.mean(tokens, axis=0)
        assert (means["rows"], means["last_rows"]) == pytest.approx((rows, layers[-1]))
        for layer, figures in means["layers"].items():
            assert figures["rows"] == pytest.approx(layers[int(layer)])
            assert 0 < figures["entropy"]["mean"] <= figures["entropy_of_mean"]["mean"] <= figures["uniform"] + 1e-9


def test_commands_for_models_that_answer_name_the_policy(folder: Path) -> None:
    """They do so before they read the data, which are moments."""
    policy = folder / "bundle"
    for command in (
        ("sinkprune-evaluate", policy, "--budgets", "nope"),
        ("sinkprune-calibrate", "norms", policy),
        ("sinkprune-calibrate", "quantize", policy, "-o", "quantised", "--weights", "int8"),
    ):
        outcome = run(*command, "--data", folder / "moments.jsonl")
        assert_refused(outcome, f"error: '{policy}' is a robot policy", "sinkprune-calibrate attention")
