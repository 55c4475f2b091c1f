"""The mean visual tokens per layer that each budget leaves a 28-layer decoder, as `sinkprune-profile` prints them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.manifest import QwenTower
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from support.models.qwen_checkpoints import QwenShape, make_qwen_checkpoint
from support.programs.commands import run
from support.programs.slow_cases import slow

TARGETS = {"none": 100.0, "prune-66.7": 33.0, "prune-77.8": 21.2, "prune-80": 20.7, "prune-88.9": 11.4}
"""Per cent of N."""


@pytest.fixture(
    scope="module", params=["qwen2_5_vl", pytest.param("qwen2_vl", marks=pytest.mark.slow), slow("qwen3_vl")]
)
def deep_bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many layers as the 7B models."""
    folder = tmp_path_factory.mktemp("deep")
    make_qwen_checkpoint(folder / "checkpoint", QwenShape(kind=request.param, num_layers=28))
    export_bundle(ExportRequest(str(folder / "checkpoint")), folder / "bundle")
    return folder / "bundle"


@pytest.fixture
def side(deep_bundle: Path) -> int:
    """Pixels along a side of a token."""
    tower = read_bundle(deep_bundle).manifest.tower(QwenTower)
    return tower.patch_size * tower.merge_size


def test_the_profile_prints_the_targets_at_480_tokens(
    deep_bundle: Path, side: int, photo: Image.Image, tmp_path: Path
) -> None:
    photo.resize((24 * side, 20 * side)).save(tmp_path / "photo.png")
    outcome = run(
        *("sinkprune-profile", deep_bundle, "--image", tmp_path / "photo.png", "--prompt", "What?"),
        *("--repeat", 1, "--warmup-rounds", 0, "--new-tokens", 2, "--json", tmp_path / "profile.json"),
    )
    assert outcome.code == 0, outcome.stderr
    report = json.loads((tmp_path / "profile.json").read_text())["budgets"]
    assert list(report) == list(TARGETS)
    rows = {line.split()[0]: line.split() for line in outcome.stdout.splitlines() if line.startswith(tuple(TARGETS))}
    for name, target in TARGETS.items():
        assert report[name]["visual_tokens"] == 480
        mean = 100 * report[name]["mean_visual_tokens"] / 480
        assert mean == pytest.approx(target, abs=0.5)
        assert rows[name][2] == f"{mean:.1f}"


def test_the_overlay_covers_the_whole_picture(
    deep_bundle: Path, side: int, photo: Image.Image, tmp_path: Path
) -> None:
    photo.resize((20 * side, 11 * side - 8)).save(tmp_path / "photo.png")
    outcome = run(
        *("sinkprune-run", deep_bundle, "--image", tmp_path / "photo.png", "--prompt", "What?", "--json"),
        *("--budget", "prune-77.8", "--max-new-tokens", 2, "--overlay", tmp_path / "kept.png"),
    )
    assert outcome.code == 0, outcome.stderr
    answer = json.loads(outcome.stdout)
    # 20 x 11 tokens: the sink, 450 and 50 per mille of them, then 120 per mille
    assert (answer["visual_tokens"], answer["kept_after_sanitizer"]) == (220, 1 + 99 + 11)
    assert answer["tokens_per_layer"][-1] == 26
    drawn = Image.open(tmp_path / "kept.png")
    assert drawn.width == 1100
    red = np.asarray(drawn)[:589].astype(int) @ [1, 0, 0] - np.asarray(drawn)[:589].astype(int) @ [0, 0.5, 0.5]
    assert (red > 40).any()
