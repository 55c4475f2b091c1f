"""`sinkprune-calibrate` from end to end on a small bundle and real pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from support.models.tasks import PHOTOS, write_task
from support.programs.commands import run, without_notes, wrote

Bundles = Callable[..., Path]


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """Three questions about two photos."""
    return write_task(tmp_path, [(image, "What is this?") for image in ("a.png", "a.png", "b.png")])


def test_each_picture_is_measured_once(
    bundle: Bundles, task: Path, tmp_path: Path, pipeline: Callable[..., Pipeline]
) -> None:
    files = tmp_path / "norms.json", tmp_path / "norms.png"
    outcome = run(
        "sinkprune-calibrate", "norms", bundle("gqa-112"), "--data", task, "--json", files[0], "--plot", files[1]
    )
    assert (outcome.code, without_notes(outcome.stderr)) == (0, wrote(files[1], files[0]))
    report = json.loads(files[0].read_text())
    assert (report["pictures"], report["tokens"]) == (2, 128)
    assert report["verdict"] in outcome.stdout
    sample, unseen = report["warnings"]
    assert "2 pictures" in sample and "a part of the picture in 2 of 2 cases" in unseen
    assert sample in outcome.stdout and unseen in outcome.stdout
    norms = np.concatenate([pipeline("gqa-112").encode(task.parent / name).norms for name in PHOTOS])
    assert report["largest"] == pytest.approx((norms / np.median(norms, axis=1, keepdims=True)).max())
    with Image.open(files[1]) as plot:
        assert plot.width > 500


def test_a_suggested_rho_can_be_exported(checkpoint: Callable[[str], Path], task: Path, tmp_path: Path) -> None:
    # 3 of 64, where 1 % are 1
    export_bundle(ExportRequest(str(checkpoint("gqa-112")), ("retain-192+rho-46",)), tmp_path / "bundle")
    kept = Pipeline.load(tmp_path / "bundle").generate(
        task.parent / "a.png", "What is this?", budget="retain-192+rho-46", max_new_tokens=1
    )
    index, norms = kept.kept.index[0], kept.kept.norms[0]
    outliers = np.argsort(-norms)[:3]
    assert index[0] == outliers[0]
    assert not {*index[1:]} & {*outliers}
