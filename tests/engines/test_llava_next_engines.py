"""LLaVA-NeXT graphs pass TensorRT: its compiler, the list of 10.3; every number of tiles has a profile."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from commands import run
from engines.shapes_sent import shapes_outside_profiles
from heads_of_64 import CONFIG, export_random

from sinkprune.bundle import read_bundle
from sinkprune.engines.trt10_checker import check_trt10
from sinkprune.engines_manifest import Range, read_engines

BUDGETS = ("retain-320", "retain-160+raster+visual-keys+compact")
NEXT_CONFIG: dict[str, Any] = {
    **CONFIG,
    "model_type": "llava_next",
    "text_config": {**CONFIG["text_config"], "model_type": "mistral", "sliding_window": None, "head_dim": 64},
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="tensorrt-rtx has wheels for x86-64 only")
@pytest.mark.parametrize("dialect", ["onnx24", "trt10"])
def test_tensorrt_rtx_builds_every_graph(dialect: str, tmp_path: Path) -> None:
    bundle = export_random(tmp_path, NEXT_CONFIG, budgets=BUDGETS, precision="fp16", dialect=dialect)
    outcome = run(
        "sinkprune-build", bundle.path, "-o", tmp_path / "engines", "--target", "tensorrt-rtx", "--sm", "86"
    )
    assert outcome.code == 0, outcome.stderr
    built = read_engines(tmp_path / "engines").manifest.engines
    assert set(built) == set(bundle.manifest.graphs)
    pixels = built["vision"].profiles["prefill"]["pixel_values"]
    assert pixels == Range((1, 3, 336, 336), (5, 3, 336, 336), (5, 3, 336, 336))
    norms = built["sinkpruner/retain-320/select_after_0"].profiles["prefill"]["norms"]
    assert norms == Range((1, 576), (5, 576), (5, 576))
    # Unpruned, an image on 2x2 tiles has 48 lines of 48 tokens and a newline
    assert built["decoder_0"].profiles["prefill"]["hidden"].max[1] >= 576 + 48 * 49


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_every_trt10_graph_is_on_the_list_of_10_3(precision: str, tmp_path: Path) -> None:
    root = export_random(tmp_path, NEXT_CONFIG, budgets=BUDGETS, precision=precision, dialect="trt10").path
    for path in (root / "graphs").rglob("*.onnx"):
        onnx.checker.check_model(path, full_check=True)
        model = onnx.load(path, load_external_data=False)
        check_trt10(model, path.stem)
        used = {name for node in model.graph.node for name in node.input}
        assert {value.name for value in model.graph.input} <= used, path


def test_every_shape_of_every_picture_lies_in_a_profile(bundle: Callable[..., Path]) -> None:
    opened = read_bundle(bundle("next", "fp32", ("retain-320", "retain-320+no-sanitizer")))
    assert not shapes_outside_profiles(opened, [[(224, 224)], [(336, 112)], [(112, 112)], [(5, 900)]])
