"""Graphs for clips pass TensorRT: its compiler, the list of 10.3; every clip and every image has a profile."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from commands import run
from engines.shapes_sent import shapes_outside_profiles
from engines.test_qwen_engines import CONFIG
from heads_of_64 import export_random
from PIL import Image

from sinkprune.bundle import read_bundle
from sinkprune.engines.trt10_checker import check_trt10
from sinkprune.engines_manifest import Range, read_engines
from sinkprune.runtime import Clip

BUDGETS = ("prune-80", "prune-80+per-frame")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="tensorrt-rtx has wheels for x86-64 only")
@pytest.mark.parametrize("dialect", ["onnx24", "trt10"])
def test_tensorrt_rtx_builds_every_graph(dialect: str, tmp_path: Path) -> None:
    options = {"precision": "fp16", "dialect": dialect, "max_frames": 8, "max_pixels": 376320}
    bundle = export_random(tmp_path, CONFIG, budgets=BUDGETS, **options)
    outcome = run(
        "sinkprune-build", bundle.path, "-o", tmp_path / "engines", "--target", "tensorrt-rtx", "--sm", "86"
    )
    assert outcome.code == 0, outcome.stderr
    built = read_engines(tmp_path / "engines").manifest.engines
    assert set(built) == set(bundle.manifest.graphs)
    vision = built["vision"].profiles["prefill"]
    assert vision["pixel_values"] == Range((1, 4, 1176), (4, 1920, 1176), (4, 1920, 1176))
    assert vision["window_index"] == Range((1, 64), (4 * 30, 64), (4 * 120 + 3, 64))
    norms = built["sinkpruner/prune-80/sanitizer"].profiles["prefill"]["norms"]
    assert norms == Range((1, 1), (4, 480), (4, 480))
    # 40 and 5 % of 1920 and the sink, or of 480 and a sink for each of four frames
    assert built["sinkpruner/prune-80/select_after_0"].profiles["prefill"]["visual_index"].max == (865,)
    assert built["sinkpruner/prune-80+per-frame/select_after_0"].profiles["prefill"]["visual_index"].max == (868,)
    assert built["decoder_0"].profiles["prefill"]["hidden"].max[1] == 1920 + 512


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_every_trt10_graph_is_on_the_list_of_10_3(precision: str, tmp_path: Path) -> None:
    options = {"precision": precision, "dialect": "trt10", "max_frames": 8, "max_pixels": 376320}
    for path in (export_random(tmp_path, CONFIG, budgets=BUDGETS, **options).path / "graphs").rglob("*.onnx"):
        onnx.checker.check_model(path, full_check=True)
        model = onnx.load(path, load_external_data=False)
        check_trt10(model, path.stem)
        used = {name for node in model.graph.node for name in node.input}
        assert {value.name for value in model.graph.input} <= used, path


def test_every_shape_of_every_clip_lies_in_a_profile(bundle: Callable[..., Path]) -> None:
    opened = read_bundle(bundle("qwen", "fp32", BUDGETS, max_frames=8))
    # The longest, the shortest, one frame left over, and the longest picture that a frame's pixels have room for
    clips = [
        Clip([Image.new("RGB", size, (90, 60, 30))] * count, fps=2)
        for size, count in (((336, 280), 8), ((56, 28), 2), ((170, 140), 7), ((5600, 28), 8), ((28, 5600), 8))
    ]
    images = [(56, 28), (672, 560), (5600, 28)]
    fitting = [clip for clip in clips if clip.frames[0].size[0] * clip.count < 20000]
    assert not shapes_outside_profiles(opened, [[picture] for picture in (*fitting, *images)])
