"""Qwen3-VL graphs pass TensorRT's compiler; every resolution and clip has an optimisation profile."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sinkprune import Clip
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.engines_manifest import Limits, Range, read_engines
from sinkprune.engines.optimisation_profiles import optimisation_profiles
from sinkprune.engines.progress import SILENT
from sinkprune.engines.targets import Job
from sinkprune.engines.targets.tensorrt_libraries import TensorRTRTX
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.dialects import DIALECTS
from sinkprune.export.methods import all_methods
from sinkprune.export.source import ExportRequest
from sinkprune.runtime.backends.models import Model
from support.models.heads_of_64 import QWEN3_CONFIG, export_random, operators
from support.programs.commands import run
from support.references.shapes_sent import shapes_outside_optimisation_profiles

BUDGETS = ("prune-80", "prune-80+per-frame")
OPTIONS: dict[str, Any] = {"budgets": BUDGETS[:1], "max_pixels": 491520, "max_frames": 8}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="tensorrt-rtx has wheels for x86-64 only")
def test_tensorrt_rtx_builds_what_other_families_lack(tmp_path: Path) -> None:
    bundle = export_random(tmp_path, QWEN3_CONFIG, precision="fp16", dialect="opset24", **OPTIONS)
    profiles = optimisation_profiles(bundle.manifest, Limits(64, 8, 1))
    for graph in ("vision", "decoder_0"):
        TensorRTRTX((89,)).build(Job(Model.of_bundle(bundle, graph), profiles[graph]), tmp_path / graph, SILENT)
        assert (tmp_path / graph).stat().st_size


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="tensorrt-rtx has wheels for x86-64 only")
@pytest.mark.parametrize("dialect", ["opset24", "opset20"])
def test_tensorrt_rtx_builds_every_graph(dialect: str, tmp_path: Path) -> None:
    bundle = export_random(tmp_path, QWEN3_CONFIG, precision="fp16", dialect=dialect, **OPTIONS)
    target = ("--target", "tensorrt-rtx", "--sm", "89")
    outcome = run("sinkprune-build", bundle.path, "-o", tmp_path / "engines", *target)
    assert outcome.code == 0, outcome.stderr
    built = read_engines(tmp_path / "engines").manifest.engines
    assert set(built) == set(bundle.manifest.graphs)
    profiles = built["decoder_0"].optimisation_profiles
    assert (profiles["prefill"]["deepstack"].max[2], profiles["decode"]["deepstack"]) == (
        384,
        Range((1, 1, 384), (1, 1, 384), (1, 2, 384)),
    )
    assert all("deepstack" not in built[f"decoder_{number}"].optimisation_profiles["decode"] for number in (1, 2, 3))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="tensorrt-rtx has wheels for x86-64 only")
@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS)
def test_tensorrt_rtx_builds_the_plans_of_every_method(dialect: str, tmp_path: Path) -> None:
    options = {**OPTIONS, "budgets": ("prune-66.7",), "methods": tuple(all_methods())}
    bundle = export_random(tmp_path, QWEN3_CONFIG, precision="fp16", dialect=dialect, **options)
    profiles = optimisation_profiles(bundle.manifest, Limits(64, 8, 1))
    graphs = [graph for plans in bundle.manifest.plans.values() for graph in plans["prune-66.7"].graphs]
    # Methods share some, and many differ in numbers alone.
    one_of_each = {(operators(bundle, graph), repr([*profiles[graph]])): graph for graph in graphs}
    for graph in one_of_each.values():
        job = Job(Model.of_bundle(bundle, graph), profiles[graph])
        built = TensorRTRTX((89,)).build(job, tmp_path / "engine", SILENT)
        assert [*built.optimisation_profiles] == [*profiles[graph]]


@pytest.mark.slow
def test_every_shape_of_every_method_lies_in_an_optimisation_profile(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    request = ExportRequest(str(checkpoint("qwen3-vl")), ("prune-66.7",), tuple(all_methods()), max_frames=4)
    export_bundle(request, tmp_path / "bundle")
    clip = Clip([Image.new("RGB", (170, 140), (90, 60, 30))] * 4, fps=2)
    opened = read_bundle(tmp_path / "bundle")
    assert not shapes_outside_optimisation_profiles(opened, [[clip], [(64, 64)], [(768, 640)]])


def test_every_shape_lies_in_an_optimisation_profile(bundle: Callable[..., Path]) -> None:
    opened = read_bundle(bundle("qwen3-vl", "fp32", BUDGETS, max_frames=8))
    clips = [
        Clip([Image.new("RGB", size, (90, 60, 30))] * count, fps=2)
        for size, count in (((170, 140), 8), ((6400, 32), 2), ((384, 320), 7))
    ]
    images = [(64, 32), (768, 640), (6400, 32)]
    assert not shapes_outside_optimisation_profiles(opened, [[picture] for picture in (*clips, *images)])
