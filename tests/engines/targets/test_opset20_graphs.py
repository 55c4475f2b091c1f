"""Every `opset20` graph of every family is on TensorRT 10.3's list.

test_trt10_checker.py has those of LLaVA for one image, by every method.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

from sinkprune.engines.trt10_checker import check_trt10
from support.models.chosen_heads import every_method
from support.models.heads_of_64 import (
    CONFIG,
    NEXT_CONFIG,
    PI0_CONFIG,
    PI05_CONFIG,
    QWEN2_CONFIG,
    QWEN3_CONFIG,
    QWEN_CONFIG,
    export_random,
)

LLAVA = ("retain-64", "retain-32+visual-keys+compact")
NEXT = ("retain-320", "retain-160+raster+visual-keys+compact")
QWEN = ("prune-66.7", "prune-88.9+raster+visual-keys")
CLIPS = ("prune-80", "prune-80+per-frame")
PIXELS = {"max_pixels": 376320}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llava, several images": (CONFIG, {"budgets": LLAVA, "max_images": 2}),
    "llava-next": (NEXT_CONFIG, {"budgets": NEXT}),
    "llava-next, several images": (NEXT_CONFIG, {"budgets": NEXT, "max_images": 2}),
    "qwen2.5-vl": (QWEN_CONFIG, {"budgets": QWEN, **PIXELS}),
    "qwen2.5-vl, several images": (QWEN_CONFIG, {"budgets": QWEN, "max_images": 2, **PIXELS}),
    "qwen2.5-vl, video": (QWEN_CONFIG, {"budgets": CLIPS, "max_frames": 8, **PIXELS}),
    "qwen2-vl, video": (QWEN2_CONFIG, {"budgets": CLIPS, "max_frames": 8, **PIXELS}),
    "qwen3-vl, every method": (
        QWEN3_CONFIG,
        {"budgets": ("prune-66.7", "prune-66.7+raster"), "max_frames": 8, **PIXELS, **every_method(QWEN3_CONFIG)},
    ),
    "pi0, several cameras": (PI0_CONFIG, {"budgets": QWEN, "max_images": 2}),
    "pi0, one camera": (PI0_CONFIG, {"budgets": QWEN}),
    "pi0.5": (PI05_CONFIG, {"budgets": QWEN[:1]}),
    "qwen3-vl, video, several images": (QWEN3_CONFIG, {"budgets": CLIPS, "max_frames": 8, "max_images": 2, **PIXELS}),
}
# The kinds with several images and with clips have all operators of these.
ALIKE = {"llava-next", "qwen2.5-vl", "qwen2.5-vl, several images", "pi0, one camera"}


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "fp16"])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind in ALIKE else []) for kind in KINDS]
)
def test_every_graph_is_on_the_list_of_10_3(kind: str, precision: str, tmp_path: Path) -> None:
    config, options = KINDS[kind]
    root = export_random(tmp_path, config, precision=precision, dialect="opset20", **options).path
    for path in (root / "graphs").rglob("*.onnx"):
        onnx.checker.check_model(path, full_check=True)
        model = onnx.load(path, load_external_data=False)
        check_trt10(model, path.stem)
        used = {name for node in model.graph.node for name in node.input}
        assert {value.name for value in model.graph.input} <= used, path
