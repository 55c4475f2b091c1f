"""Qwen2.5-VL graphs pass TensorRT's compiler; shapes of every resolution have an optimisation profile."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.engines_manifest import Range, read_engines
from sinkprune.export.dialects import DIALECTS
from support.models.heads_of_64 import QWEN_CONFIG, export_random
from support.programs.commands import run
from support.references.shapes_sent import shapes_outside_optimisation_profiles

BUDGETS = ("prune-66.7", "prune-88.9+raster+visual-keys")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="tensorrt-rtx has wheels for x86-64 only")
@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS)
def test_tensorrt_rtx_builds_every_graph(dialect: str, tmp_path: Path) -> None:
    options = {"precision": "fp16", "dialect": dialect, "max_pixels": 376320}
    bundle = export_random(tmp_path, QWEN_CONFIG, budgets=BUDGETS, **options)
    outcome = run(
        "sinkprune-build", bundle.path, "-o", tmp_path / "engines", "--target", "tensorrt-rtx", "--sm", "86,89,120"
    )
    assert outcome.code == 0, outcome.stderr
    built = read_engines(tmp_path / "engines").manifest.engines
    assert set(built) == set(bundle.manifest.graphs)
    assert "projector" not in built
    vision = built["vision"].optimisation_profiles["prefill"]
    assert vision["pixel_values"] == Range((1, 4, 1176), (1, 1920, 1176), (1, 1920, 1176))
    assert vision["window_index"] == Range((1, 64), (30, 64), (120, 64))


def test_every_shape_of_every_resolution_lies_in_an_optimisation_profile(bundle: Callable[..., Path]) -> None:
    opened = read_bundle(bundle("qwen", "fp32", BUDGETS))
    # The smallest that can be pruned, the largest, and the longest either way
    assert not shapes_outside_optimisation_profiles(opened, [[(56, 28)], [(672, 560)], [(5600, 28)], [(28, 5600)]])
