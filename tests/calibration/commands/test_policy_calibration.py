"""`sinkprune-calibrate attention` of a robot policy, on moments of two cameras."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sinkprune import ActionReport, Policy
from sinkprune.contract.bundle import read_bundle
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.methods.heads import read_heads
from sinkprune.export.source import ExportRequest
from support.programs.commands import assert_refused, run

ATTENTION = ("sinkprune-calibrate", "attention")
BUDGETS = ("prune-66.7", "prune-88.9")
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
    methods = ("sinkpruner", "random")
    export_bundle(ExportRequest(str(checkpoint("pi0")), BUDGETS, methods, max_images=2), root / "bundle")
    for number, name in enumerate(("a.png", "b.png", "c.png")):
        photo.crop((60 * number, 20, 60 * number + 240, 220)).save(root / name)
    lines = [{"cameras": list(names), "instruction": words, "state": STATE} for names, words in MOMENTS]
    (root / "moments.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return root


def acted(policy: Policy, folder: Path, method: str, budget: str) -> list[ActionReport]:
    """What the policy does at each moment."""
    found = []
    for names, words in MOMENTS:
        cameras = [None if name is None else folder / name for name in names]
        found.append(policy.act(cameras, words, STATE, method=method, budget=budget, steps=1))
    return found


def test_shares_of_sink_tokens_are_those_of_all_cameras(folder: Path) -> None:
    """`random` keeps the sink token of one camera and not of another, so a camera that is left out shows."""
    options = ("--methods", "sinkpruner,random", "--budgets", "prune-66.7", "--json")
    outcome = run(*ATTENTION, folder / "bundle", "--data", folder / "moments.jsonl", *options)
    assert outcome.code == 0, outcome.stderr
    found = json.loads(outcome.stdout)
    assert (found["questions"], found["pictures"], found["outlier_per_mille"]) == (4, 3, 10)
    policy = Policy.load(folder / "bundle")
    for method, budget, run_means in (
        ("sinkpruner", "none", found["none"]),
        *((method, "prune-66.7", found["methods"][method]["prune-66.7"]) for method in ("sinkpruner", "random")),
    ):
        shares, rows, alone, last, unequal = [], [], [], [], False
        for report in acted(policy, folder, method, budget):
            marked, survived = [], []
            for kept in report.images:
                # One token of 64 is a sink token: that of the largest norm.
                own = kept.index.ravel() == np.argmax(kept.norms[0])
                marked += own.tolist()
                stages = kept.after_stage
                survived += own[stages[max(stages)]].tolist() if stages else own.tolist()
            shares.append(float(np.mean(marked)))
            last.append(float(np.mean(survived)))
            unequal |= len({np.argmax(kept.norms[0]) in kept.index for kept in report.images}) > 1
            salient = []
            for kept in report.images:
                top = np.argsort(-kept.salience[0], kind="stable")[: kept.index.size]
                salient += (top == int(np.argmax(kept.norms[0]))).tolist()
            alone.append(float(np.mean(salient)))
            rows.append(len(marked))
        assert unequal == (method == "random")
        assert run_means["sink_share"]["mean"] == pytest.approx(np.mean(shares))
        assert run_means["last_sink_share"]["mean"] == pytest.approx(np.mean(last))
        assert run_means["salience_alone"]["mean"] == pytest.approx(np.mean(alone))
        assert run_means["rows"] == pytest.approx(np.mean(rows))
        assert run_means["last_rows"] == pytest.approx(
            np.mean([report.tokens_per_layer[-1] for report in acted(policy, folder, method, budget)])
        )
        assert [*map(int, run_means["layers"])] == list(policy.bundle.manifest.cut_after)
        for layer, figures in run_means["layers"].items():
            tokens = np.mean(
                [report.tokens_per_layer[int(layer)] for report in acted(policy, folder, method, budget)]
            )
            assert figures["rows"] == pytest.approx(tokens)
            assert 0 < figures["entropy"]["mean"] <= figures["entropy_of_mean"]["mean"] <= figures["uniform"] + 1e-9


def test_heads_are_chosen_and_exported(folder: Path, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    heads, data = tmp_path / "heads.json", folder / "moments.jsonl"
    outcome = run(*ATTENTION, folder / "bundle", "--data", data, "--budgets", "none", "--heads", heads)
    assert outcome.code == 0, outcome.stderr
    chosen = read_heads(heads)
    manifest = read_bundle(folder / "bundle").manifest
    assert {*map(int, chosen.layers)} <= {*manifest.cut_after}
    assert all(len(each.question_dependence) == manifest.language_model.num_heads for each in chosen.layers.values())
    assert any(each.chosen for each in chosen.layers.values())
    request = ExportRequest(
        str(checkpoint("pi0")), ("prune-66.7",), ("sinkpruner-heads",), max_images=2, heads=chosen
    )
    export_bundle(request, tmp_path / "bundle")
    reports = acted(Policy.load(tmp_path / "bundle"), folder, "sinkpruner-heads", "prune-66.7")
    assert all(report.tokens_per_layer[-1] < report.visual_tokens for report in reports)


@pytest.mark.parametrize(
    "command",
    [
        ("sinkprune-evaluate", "--budgets", "nope"),
        ("sinkprune-calibrate", "norms"),
        ("sinkprune-calibrate", "quantize", "-o", "quantised", "--weights", "int8"),
    ],
)
def test_commands_for_models_that_answer_name_the_policy(command: tuple[object, ...], folder: Path) -> None:
    """They do so before they read the data, which are moments."""
    policy, (name, *words) = folder / "bundle", command
    outcome = run(str(name), *words, policy, "--data", folder / "moments.jsonl")
    found = f"error: '{policy}' is a robot policy (family 'pi0'), which gives actions and no text. "
    assert_refused(outcome, f"{found}Use sinkprune-calibrate attention or sinkprune-act.\n")


def test_what_is_refused(folder: Path, bundle: Callable[..., Path], photo_file: Path, tmp_path: Path) -> None:
    policy, data = folder / "bundle", tmp_path / "moments.jsonl"
    shutil.copy(photo_file, tmp_path / "photo.png")
    line = {"cameras": ["photo.png", None], "instruction": "go", "state": STATE}
    data.write_text(json.dumps(line))
    assert_refused(run(*ATTENTION, policy, "--data", data, "--heads", tmp_path / "x.json"), "at least two different")
    assert_refused(run(*ATTENTION, policy), "expected a file of moments that ends in .jsonl")
    assert_refused(run(*ATTENTION, bundle("gqa-112"), "--data", data), "The fields are image, question, answer")
    data.write_text(json.dumps({**line, "state": [1]}))
    assert_refused(run(*ATTENTION, policy, "--data", data), "line 1: the state has the shape [1], expected 5 numbers")
