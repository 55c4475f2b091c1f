"""Qwen2-VL graphs pass TensorRT: its compiler, the list of 10.3; every resolution and clip has a profile."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from commands import run
from engines.shapes_sent import shapes_outside_profiles
from engines.test_qwen_engines import CONFIG
from heads_of_64 import export_random
from PIL import Image

from sinkprune.bundle import read_bundle
from sinkprune.engines.trt10_checker import check_trt10
from sinkprune.engines_manifest import read_engines
from sinkprune.runtime import Clip

BUDGETS = ("prune-77.8", "prune-80+per-frame")
QWEN2_CONFIG: dict[str, Any] = {
    **CONFIG,
    "model_type": "qwen2_vl",
    "vision_config": {"depth": 3, "embed_dim": 160, "mlp_ratio": 2, "num_heads": 2, "hidden_size": 256},
}
OPTIONS: dict[str, Any] = {"budgets": BUDGETS, "max_pixels": 376320, "max_frames": 8}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="tensorrt-rtx has wheels for x86-64 only")
@pytest.mark.parametrize("dialect", ["onnx24", "trt10"])
def test_tensorrt_rtx_builds_every_graph(dialect: str, tmp_path: Path) -> None:
    bundle = export_random(tmp_path, QWEN2_CONFIG, precision="fp16", dialect=dialect, **OPTIONS)
    target = ("--target", "tensorrt-rtx", "--sm", "86")
    outcome = run("sinkprune-build", bundle.path, "-o", tmp_path / "engines", *target)
    assert outcome.code == 0, outcome.stderr
    assert set(read_engines(tmp_path / "engines").manifest.engines) == set(bundle.manifest.graphs)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_every_trt10_graph_is_on_the_list_of_10_3(precision: str, tmp_path: Path) -> None:
    root = export_random(tmp_path, QWEN2_CONFIG, precision=precision, dialect="trt10", **OPTIONS).path
    for path in (root / "graphs").rglob("*.onnx"):
        onnx.checker.check_model(path, full_check=True)
        model = onnx.load(path, load_external_data=False)
        check_trt10(model, path.stem)
        used = {name for node in model.graph.node for name in node.input}
        assert {value.name for value in model.graph.input} <= used, path


def test_every_shape_lies_in_a_profile(bundle: Callable[..., Path]) -> None:
    opened = read_bundle(bundle("qwen2-vl", "fp32", BUDGETS, max_frames=8))
    clip = Clip([Image.new("RGB", (170, 140), (90, 60, 30))] * 8, fps=2)
    assert not shapes_outside_profiles(opened, [[(56, 28)], [(672, 560)], [(5600, 28)], [clip]])
