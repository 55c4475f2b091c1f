"""Graphs for several images pass TensorRT's compiler; every prompt has an optimisation profile."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.engines_manifest import read_engines
from sinkprune.export.dialects import DIALECTS
from support.models.heads_of_64 import CONFIG, NEXT_CONFIG, QWEN_CONFIG, export_random
from support.programs.commands import run
from support.references.shapes_sent import shapes_outside_optimisation_profiles

CONFIGS: dict[str, dict[str, Any]] = {"llava": CONFIG, "llava-next": NEXT_CONFIG, "qwen": QWEN_CONFIG}
BUDGETS = {
    "llava": ("retain-64", "retain-32+visual-keys+compact"),
    "llava-next": ("retain-320",),
    "qwen": ("prune-77.8",),
}
# The largest prompts: what the small checkpoints have positions for
PROMPTS = {
    "gqa-112": [[(30, 30)], [(600, 400), (20, 90)], [(112, 112)] * 3],
    "next": [[(224, 224), (224, 224)], [(336, 112), (5, 900)], [(112, 112)]],
    "qwen": [[(56, 28), (300, 500)], [(448, 560), (448, 560)], [(56, 28)]],
}
NAMES = {"gqa-112": "llava", "next": "llava-next", "qwen": "qwen"}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="tensorrt-rtx has wheels for x86-64 only")
@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_tensorrt_rtx_builds_every_graph(name: str, dialect: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"precision": "fp16", "dialect": dialect, "max_images": 3}
    config, pixels = CONFIGS[name], {"max_pixels": 376320} if name == "qwen" else {}
    config = {**config, "text_config": {**config["text_config"], "max_position_embeddings": 16384}}
    bundle = export_random(tmp_path, config, budgets=BUDGETS[name], **options, **pixels)
    target = ("--target", "tensorrt-rtx", "--sm", "86,89,120", "--max-images", 3)
    outcome = run("sinkprune-build", bundle.path, "-o", tmp_path / "engines", *target)
    assert outcome.code == 0, outcome.stderr
    built = read_engines(tmp_path / "engines").manifest.engines
    stage = built[f"sinkpruner/{BUDGETS[name][0]}/select_after_0"].optimisation_profiles["prefill"]
    assert (stage["quota"].min, stage["quota"].max) == ((1,), stage["visual_group"].max)
    assert stage["quota"].max[0] == 3 * stage["quota"].opt[0]
    assert "norms" not in stage


@pytest.mark.parametrize("name", PROMPTS)
def test_every_shape_of_every_prompt_lies_in_an_optimisation_profile(name: str, bundle: Callable[..., Path]) -> None:
    opened = read_bundle(bundle(name, "fp32", BUDGETS[NAMES[name]], max_images=3))
    assert not shapes_outside_optimisation_profiles(opened, PROMPTS[name])


def test_an_engine_for_fewer_images_than_the_bundle(bundle: Callable[..., Path], tmp_path: Path) -> None:
    root = bundle("gqa-112", "fp32", ("retain-64",), max_images=3)
    target = ("--target", "onnxruntime", "--max-images", 2)
    assert run("sinkprune-build", root, "-o", tmp_path / "engines", *target).code == 0
    assert read_engines(tmp_path / "engines").manifest.limits.images == 2
    refused = run("sinkprune-build", root, "-o", tmp_path / "more", "--target", "onnxruntime", "--max-images", 4)
    assert refused.code == 2
    assert "exported for up to 3" in refused.stderr
