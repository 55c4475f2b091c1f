"""Qwen2-VL graphs pass TensorRT's compiler; every resolution and clip has an optimisation profile."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sinkprune import Clip
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.engines_manifest import Limits, read_engines
from sinkprune.engines.optimisation_profiles import optimisation_profiles
from sinkprune.engines.progress import SILENT
from sinkprune.engines.targets import Job
from sinkprune.engines.targets.tensorrt_libraries import TensorRTRTX
from sinkprune.runtime.backends.models import Model
from support.models.heads_of_64 import QWEN2_CONFIG, export_random
from support.programs.commands import run
from support.references.shapes_sent import shapes_outside_optimisation_profiles

BUDGETS = ("prune-77.8", "prune-80+per-frame")
OPTIONS: dict[str, Any] = {"budgets": BUDGETS, "max_pixels": 376320, "max_frames": 8}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="tensorrt-rtx has wheels for x86-64 only")
@pytest.mark.parametrize("dialect", ["opset24", "opset20"])
def test_tensorrt_rtx_builds_the_tower(dialect: str, tmp_path: Path) -> None:
    """All that this family does not share with Qwen2.5-VL."""
    bundle = export_random(tmp_path, QWEN2_CONFIG, precision="fp16", dialect=dialect, **OPTIONS)
    profiles = optimisation_profiles(bundle.manifest, Limits(64, 8, 1))["vision"]
    TensorRTRTX((89,)).build(Job(Model.of_bundle(bundle, "vision"), profiles), tmp_path / "engine", SILENT)
    assert (tmp_path / "engine").stat().st_size


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="tensorrt-rtx has wheels for x86-64 only")
@pytest.mark.parametrize("dialect", ["opset24", "opset20"])
def test_tensorrt_rtx_builds_every_graph(dialect: str, tmp_path: Path) -> None:
    bundle = export_random(tmp_path, QWEN2_CONFIG, precision="fp16", dialect=dialect, **OPTIONS)
    target = ("--target", "tensorrt-rtx", "--sm", "86,89,120")
    outcome = run("sinkprune-build", bundle.path, "-o", tmp_path / "engines", *target)
    assert outcome.code == 0, outcome.stderr
    assert set(read_engines(tmp_path / "engines").manifest.engines) == set(bundle.manifest.graphs)


def test_every_shape_lies_in_an_optimisation_profile(bundle: Callable[..., Path]) -> None:
    opened = read_bundle(bundle("qwen2-vl", "fp32", BUDGETS, max_frames=8))
    clip = Clip([Image.new("RGB", (170, 140), (90, 60, 30))] * 8, fps=2)
    assert not shapes_outside_optimisation_profiles(opened, [[(56, 28)], [(672, 560)], [(5600, 28)], [clip]])
