"""Towers that join other numbers of patches to a token than published ones do."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from support.models.qwen_checkpoints import QwenShape, make_qwen_checkpoint
from support.programs.commands import run
from support.programs.slow_cases import slow_except
from support.references.same_answers import assert_equal


@pytest.mark.parametrize("merge", slow_except({3}, [3, 5]))
def test_openvino_answers_as_onnxruntime_with_every_merge(merge: int, photo: Image.Image, tmp_path: Path) -> None:
    shape = QwenShape(depth=2, full_attention_blocks=(1,), merge_size=merge, most_tokens=30)
    checkpoint = make_qwen_checkpoint(tmp_path / "checkpoint", shape)
    export_bundle(ExportRequest(str(checkpoint), budgets=("prune-66.7",)), tmp_path / "bundle")
    theirs = Pipeline.load(tmp_path / "bundle")
    ours = Pipeline.load(tmp_path / "bundle", backend="openvino", compute="fp32")
    assert ours.bundle.manifest.vision.patches_per_token == merge**2
    for budget in ("none", "prune-66.7"):
        assert_equal(ours, theirs, photo, budget=budget)
    if merge == 3:
        run("sinkprune-build", tmp_path / "bundle", "-o", tmp_path / "engines", "--target", "openvino")
        assert_equal(Pipeline.load(tmp_path / "engines", compute="fp32"), theirs, photo, budget="prune-66.7")
