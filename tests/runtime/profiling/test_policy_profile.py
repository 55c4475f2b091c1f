"""The profile of a policy: kinds of chunks in turn, figures by hand, and what the command prints and refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sinkprune import ActionReport, Policy
from sinkprune.contract.command_line.table_console import TEXT_WIDTH
from sinkprune.contract.flops import expert_flops, prefix_flops
from sinkprune.contract.report import Spread
from sinkprune.policies.profile import PolicyRounds
from sinkprune.policies.report import PROFILE_PARTS, PolicyReport
from support.programs.commands import assert_refused, run

BUDGETS = ("prune-77.8", "prune-88.9")
STATE = (0.5, 0.1, -0.2, 0.3, 0.4)
GO = ("--instruction", "pick up the cup", "--state", ",".join(map(str, STATE)))


@pytest.fixture(scope="module")
def policy(bundle: Callable[..., Path]) -> Policy:
    """A small policy of two cameras."""
    return Policy.load(bundle("pi0", budgets=BUDGETS, max_images=2))


def profiled(
    policy: Policy, photo: Image.Image, budgets: Any = BUDGETS, repeat: int = 1, warmup: int = 0
) -> PolicyReport:
    rounds = PolicyRounds(policy, [photo, None], "pick up the cup", STATE, budgets, (10, 2), method="sinkpruner")
    rounds.measure(repeat, warmup, lambda _: None)
    return rounds.report()


def test_figures_are_those_of_the_chunks(policy: Policy, photo: Image.Image, monkeypatch: pytest.MonkeyPatch) -> None:
    """With chunks whose prefix takes 100 ms unpruned and 40 ms pruned, and whose steps take 4 ms and 2 ms."""
    real = {name: policy.act([photo, None], "go", STATE, budget=name, steps=2) for name in ("none", "prune-88.9")}
    count, flops = dict.fromkeys(real, 0), type(real["none"].flops)

    def act(self: Policy, *given: Any, budget: str, steps: int, **options: Any) -> ActionReport:
        step, prefix = (4.0, 100.0) if budget == "none" else (2.0, 40.0)
        # The first chunk is the warm-up; later ones take 1 ms more each.
        later = 1000.0 if count[budget] < 2 else float(count[budget] // 2)
        count[budget] += 1
        ms = dict.fromkeys(real[budget].ms, 1.0) | {"prefill": prefix, "expert": steps * step}
        ms["latency"] = prefix + steps * step + 10 + later
        counted = flops(tower=100, projector=10, prefix=1000, expert=50 * steps)
        return replace(real[budget], steps=steps, step_ms=[step] * steps, ms=ms, flops=counted)

    monkeypatch.setattr(Policy, "act", act)
    report = profiled(policy, photo, ["prune-88.9"], repeat=3, warmup=1)
    pruned, none = report.budgets["prune-88.9"], report.budgets["none"]
    assert report.repeat == 3 and report.actions == 5 and report.cameras == 1
    assert (pruned.speedup["prefix"], pruned.speedup["step"]) == (2.5, 2.0)
    assert (none.speedup["prefix"], none.efficiency["prefix"], none.chunks["10"].speedup) == (1.0, 1.0, 1.0)
    assert set(pruned.ms) == set(PROFILE_PARTS)
    assert pruned.ms["step"] == Spread(2.0, 2.0)
    # Rounds 1, 2 and 3 take 1, 2 and 3 ms more.
    assert (pruned.chunks["10"].ms, pruned.chunks["2"].ms) == (Spread(72.0, 73.0), Spread(56.0, 57.0))
    chunk = pruned.chunks["2"]
    assert (chunk.rate_hz, chunk.jitter_ms, chunk.speedup) == (pytest.approx(1000 / 56), 1.0, 120 / 56)
    # As many FLOPs, because these chunks say so.
    assert (pruned.flops_speedup["prefix"], pruned.efficiency["prefix"], chunk.flops_speedup) == (1.0, 2.5, 1.0)
    assert pruned.flops == {"tower": 100, "projector": 10, "prefix": 1000, "step": 50}


def test_flops_are_those_of_the_layers(policy: Policy, photo: Image.Image) -> None:
    report = profiled(policy, photo)
    model = policy.bundle.manifest.language_model
    pruned, none = report.budgets["prune-88.9"], report.budgets["none"]
    for budget in report.budgets.values():
        rows = [visual + report.prompt_tokens for visual in budget.tokens_per_layer]
        assert budget.flops["prefix"] == prefix_flops(model, rows)
        assert budget.flops["step"] == expert_flops(policy.facts, rows)
        assert budget.mean_visual_tokens == sum(budget.tokens_per_layer) / model.num_layers
    assert pruned.flops_speedup["prefix"] == none.flops["prefix"] / pruned.flops["prefix"] > 2
    assert pruned.flops_speedup["step"] == none.flops["step"] / pruned.flops["step"] > 1
    assert pruned.flops["tower"] == none.flops["tower"] and pruned.flops["projector"] < none.flops["projector"]
    for steps, chunk in pruned.chunks.items():
        whole, own = (sum(flops.values()) + (int(steps) - 1) * flops["step"] for flops in (none.flops, pruned.flops))
        assert chunk.flops_speedup == whole / own
    assert (pruned.visual_tokens, pruned.kept_after_sanitizer) == (64, pruned.tokens_per_layer[0])
    assert report.first_chunk_ms is not None and policy.load_ms is not None
    assert report.first_chunk_ms > policy.load_ms


@pytest.fixture
def profile(bundle: Callable[..., Path], photo_file: Path) -> Callable[..., Any]:
    """Runs `sinkprune-profile` on the small policy, with a photo for the first of two cameras."""
    path, cameras = bundle("pi0", budgets=BUDGETS, max_images=2), ("--camera", photo_file, "--camera", "none")
    return lambda *words: run("sinkprune-profile", path, *cameras, *GO, *words)


def test_the_command_measures_a_policy(profile: Callable[..., Any], tmp_path: Path) -> None:
    outcome = profile("--repeat", 1, "--json", tmp_path / "x.json", "--plot", tmp_path / "x.png")
    assert outcome.code == 0, outcome.stderr
    report = json.loads((tmp_path / "x.json").read_text())
    assert list(report["budgets"]) == ["none", *BUDGETS]
    # The checkpoint's own number of steps, and fewer.
    assert all(list(own["chunks"]) == ["10", "5", "2"] for own in report["budgets"].values())
    assert report["interrupted"] is None and (tmp_path / "x.png").stat().st_size > 10_000
    own = report["budgets"]["prune-88.9"]
    lines = outcome.stdout.splitlines()
    assert max(map(len, lines)) <= TEXT_WIDTH
    tokens = ["prune-88.9", "64", "16", "6", f"{100 * own['mean_visual_tokens'] / 64:.1f}"]
    assert any(line.split()[:5] == tokens for line in lines)
    assert "one round does not show how much runs differ" in outcome.stdout
    one = json.loads(profile("--repeat", 1, "--budgets", "prune-88.9", "--steps", "3,3", "--json").stdout)
    chunks = [(name, list(own["chunks"])) for name, own in one["budgets"].items()]
    assert chunks == [("none", ["3"]), ("prune-88.9", ["3"])]


def test_pictures_are_for_models_that_answer_and_cameras_for_policies(
    bundle: Callable[..., Path], profile: Callable[..., Any], photo_file: Path, tmp_path: Path
) -> None:
    asked, cameras = ("--image", photo_file, "--prompt", "go"), ("--camera", photo_file)
    for name in ("0.jpg", "1.jpg"):
        (tmp_path / name).write_bytes(photo_file.read_bytes())
    for words, said in (
        (("--new-tokens", "3"), "--new-tokens is for models that answer questions"),
        (("--warm", "--power"), "--warm and --power are for models that answer questions"),
        (("--budgets", "retain-64"), "retain-64"),
        (cameras, "found 3 cameras"),
    ):
        assert_refused(profile(*words), said)
    own, other = bundle("pi0", budgets=BUDGETS, max_images=2), bundle("gqa-112")
    for root, words, said in (
        (own, asked, "Leave it out, and give --camera and --state."),
        (other, (*cameras, *GO), "--camera and --state are for robot policies"),
        (other, (*cameras, "--prompt", "go"), "and give --image."),
        (own, (*cameras, *cameras, "--instruction", "go"), "no state was given"),
        (other, (*asked, "--steps", "3"), "--steps is for robot policies"),
        (own, ("--camera", tmp_path, "--camera", "none", *GO), "found 2 moments, expected one"),
    ):
        assert_refused(run("sinkprune-profile", root, *words), said)
