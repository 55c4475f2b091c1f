"""Qwen2.5-VL graphs pass TensorRT: its compiler, the list of 10.3; shapes of every resolution have a profile."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from commands import run
from engines.shapes_sent import shapes_outside_profiles
from PIL import Image

from sinkprune.bundle import read_bundle
from sinkprune.engines.trt10_checker import check_trt10
from sinkprune.engines_manifest import Range, read_engines
from sinkprune.export.bundle_writer import Request, export_bundle
from sinkprune.runtime.pipeline import Pipeline

BUDGETS = ("prune-66.7", "prune-88.9+raster+visual-keys")
# TensorRT's attention takes no heads smaller than 64. The tower's are 80, as in the real model.
CONFIG: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "image_token_id": 300,
    "video_token_id": 301,
    "vision_start_token_id": 302,
    "vision_end_token_id": 303,
    "vision_config": {
        "depth": 4,
        "hidden_size": 160,
        "intermediate_size": 212,
        "num_heads": 2,
        "out_hidden_size": 256,
        "fullatt_block_indexes": [1, 3],
    },
    "text_config": {
        "hidden_size": 256,
        "intermediate_size": 320,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "eos_token_id": 305,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
    },
}


@pytest.fixture(scope="module")
def random_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A bundle for images of up to 376320 pixels."""

    def get(**request: Any) -> Path:
        folder = tmp_path_factory.mktemp("qwen")
        (folder / "config.json").write_text(json.dumps(CONFIG))
        options = {"budgets": BUDGETS, "random_weights": True, "max_pixels": 376320, **request}
        export_bundle(Request(str(folder), **options), folder / "bundle")
        return folder / "bundle"

    return get


@pytest.mark.skipif(platform.machine() != "x86_64", reason="tensorrt-rtx has wheels for x86-64 only")
@pytest.mark.parametrize("dialect", ["onnx24", "trt10"])
def test_tensorrt_rtx_builds_every_graph(dialect: str, random_bundle: Callable[..., Path], tmp_path: Path) -> None:
    root = random_bundle(precision="fp16", dialect=dialect)
    outcome = run("sinkprune-build", root, "-o", tmp_path / "engines", "--target", "tensorrt-rtx", "--sm", "86")
    assert outcome.code == 0, outcome.stderr
    built = read_engines(tmp_path / "engines").manifest.engines
    assert set(built) == set(read_bundle(root).manifest.graphs)
    assert "projector" not in built
    vision = built["vision"].profiles["prefill"]
    assert vision["pixel_values"] == Range((1, 4, 1176), (1, 1920, 1176), (1, 1920, 1176))
    assert vision["window_index"] == Range((1, 64), (30, 64), (120, 64))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_every_trt10_graph_is_on_the_list_of_10_3(precision: str, random_bundle: Callable[..., Path]) -> None:
    for path in (random_bundle(precision=precision, dialect="trt10") / "graphs").rglob("*.onnx"):
        onnx.checker.check_model(path, full_check=True)
        model = onnx.load(path, load_external_data=False)
        check_trt10(model, path.stem)
        used = {name for node in model.graph.node for name in node.input}
        assert {value.name for value in model.graph.input} <= used, path


@pytest.mark.parametrize("budget", ["none", *BUDGETS])
def test_both_dialects_answer_alike(budget: str, bundle: Callable[..., Path], photo: Image.Image) -> None:
    answers = [
        Pipeline.load(bundle("qwen", "fp32", BUDGETS, dialect)).generate(
            photo.resize((300, 520)), "What is this?", budget=budget, max_new_tokens=6, min_new_tokens=6
        )
        for dialect in ("onnx24", "trt10")
    ]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].kept.index.tolist() == answers[1].kept.index.tolist()


def test_every_shape_of_every_resolution_lies_in_a_profile(bundle: Callable[..., Path]) -> None:
    opened = read_bundle(bundle("qwen", "fp32", BUDGETS))
    # The smallest that can be pruned, the largest, and the longest either way
    assert not shapes_outside_profiles(opened, [[(56, 28)], [(672, 560)], [(5600, 28)], [(28, 5600)]])
