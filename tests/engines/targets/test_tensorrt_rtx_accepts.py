"""TensorRT's parser and compiler accept every fp16 graph, for prefill and decode, on three generations of GPUs.

The tests build methods in `opset20` and SinkPruner in `opset24`, each sequence of operators once. `make test-slow`
adds the other methods, every budget, and SinkPruner in fp32. The builder is that of `sinkprune-build`, with its
optimisation profiles and its checks.

TensorRT-RTX builds without a GPU. It has the front end of TensorRT 11, which would reject the same graphs. These
tests cover neither numbers nor speed.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from support.models.heads_of_64 import CONFIG, QWEN3_CONFIG, export_random, operators
from support.programs.slow_cases import slow_except

if platform.machine() != "x86_64":
    pytest.skip("tensorrt-rtx has wheels for x86-64 only", allow_module_level=True)

from sinkprune.contract.budgets import MERGING_TOWER, TOWER
from sinkprune.contract.bundle import Bundle
from sinkprune.contract.engines_manifest import Limits, read_engines
from sinkprune.engines.build import build_engines, small_jobs
from sinkprune.engines.profiles import SmallGraphs, optimisation_profiles
from sinkprune.engines.progress import SILENT
from sinkprune.engines.targets import BuildJob
from sinkprune.engines.targets.tensorrt import TensorRTRTX
from sinkprune.export.dialects import DIALECTS
from sinkprune.export.methods import METHODS as ALL_METHODS
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.backends.small_graphs import (
    AT_TOKENS,
    BEST,
    IN_ORDER,
    IN_PARTS,
    NOT_FINITE,
    PLACES_OF,
    places_of_graph,
)
from sinkprune.runtime.frames import FrameForm, bilinear_form, patch_form, square_form

BUDGETS = ("retain-192", "retain-128", "retain-64", "retain-32", "retain-64+raster+visual-keys+compact")
# Deep enough for the layers that every method prunes after.
DEEP = {**CONFIG, "text_config": {**CONFIG["text_config"], "num_hidden_layers": 8}}
KINDS = [("opset24", "fp16"), ("opset20", "fp16"), ("opset20", "fp32")]
# The kernel's name in an engine.
FUSED_ATTENTION = b"_gemm_mha_v2"
COMPUTE_CAPABILITIES = (86, 89, 120)
LIMITS = Limits(prompt_tokens=1400, new_tokens=400, images=5)


class Graphs(NamedTuple):
    """A bundle, and graphs of it to compile, which differ in the order of operators or in the inputs of a profile.

    Most graphs differ in numbers alone, e.g. in how many tokens they keep.
    """

    bundle: Bundle
    one_of_each: frozenset[str]


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Graphs]:
    """Every method at every budget, in a dialect and a precision."""

    @cache
    def get(dialect: str, precision: str) -> Graphs:
        methods = {"methods": tuple(ALL_METHODS)} if precision == "fp16" else {}
        options = {"budgets": BUDGETS, "dialect": dialect, **methods}
        folder = tmp_path_factory.mktemp(f"{dialect}-{precision}")
        bundle = export_random(folder, DEEP, precision=precision, **options)
        one_of_each: dict[object, str] = {}
        for graph, profiles in optimisation_profiles(bundle.manifest, LIMITS).items():
            inputs = {name: tuple(ranges) for name, ranges in profiles.items()}
            one_of_each.setdefault((operators(bundle, graph), repr(inputs)), graph)
        return Graphs(bundle, frozenset(one_of_each.values()))

    return get


def with_weights(bundle: Bundle) -> list[str]:
    return [graph for graph in bundle.manifest.graphs if "/" not in graph]


def of_method(bundle: Bundle, method: str) -> Iterator[str]:
    for plan in bundle.manifest.plans[method].values():
        yield from plan.graphs


def compile_graph(bundle: Bundle, graph: str, folder: Path) -> bytes:
    """Return the engine of a graph. Nodes of domain `sinkprune` are functions, as RTX takes no plugins."""
    builder = TensorRTRTX(COMPUTE_CAPABILITIES)
    job = BuildJob(Model.of_bundle(bundle, graph), optimisation_profiles(bundle.manifest, LIMITS)[graph])
    built = builder.build(job, folder / "engine", SILENT)
    assert set(built.nodes.values()) <= {"function"}
    assert builder.plugins == {}
    return (folder / "engine").read_bytes()


@pytest.mark.parametrize(("dialect", "precision"), slow_except({("opset24", "fp16")}, KINDS))
def test_graphs_with_weights_compile(
    dialect: str, precision: str, graphs: Callable[[str, str], Graphs], tmp_path: Path
) -> None:
    bundle = graphs(dialect, precision).bundle
    assert {"vision", "projector", "decoder_0", "decoder_2", "head"} < set(with_weights(bundle))
    for graph in with_weights(bundle):
        engine = compile_graph(bundle, graph, tmp_path)
        # TensorRT has fused kernels for attention in fp16, none for fp32.
        has_attention = graph == "vision" or graph.startswith("decoder_")
        assert (FUSED_ATTENTION in engine) == (has_attention and precision == "fp16"), graph


SCALE = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5] * 3}
PIXELS = {**SCALE, "image_std": [0.5] * 3, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
TABLE = np.zeros(768, np.float16)


@pytest.mark.parametrize(
    "small",
    [
        square_form(336, TABLE, masked=True, views=3),
        bilinear_form(224, TABLE.dtype, PIXELS),
        patch_form(TABLE, PIXELS, most_tokens=1280),
    ],
)
def test_small_graphs_compile(small: FrameForm | SmallGraphs, tmp_path: Path) -> None:
    for job in small_jobs(small, tmp_path):
        TensorRTRTX(COMPUTE_CAPABILITIES[:1]).build(job, tmp_path / job.model.graph, SILENT)


def test_the_graphs_of_a_video_model_compile_for_its_largest_clip(tmp_path: Path) -> None:
    options = {"precision": "fp16", "dialect": "opset24", "budgets": ("prune-80",), "max_frames": 64}
    bundle = export_random(tmp_path, QWEN3_CONFIG, **options)
    # Qwen3-VL-8B's.
    shape = {"hidden_size": 4096, "head_dim": 128, "rope_sections": (24, 20, 20), "max_positions": 1 << 18}
    manifest = replace(bundle.manifest, language_model=replace(bundle.manifest.language_model, **shape))
    found = SmallGraphs.of(manifest, LIMITS)
    assert found.graphs.keys() > {BEST, NOT_FINITE, AT_TOKENS, IN_PARTS, IN_ORDER}
    # A tower that merges belongs to other models.
    for job in small_jobs(found._replace(graphs={**found.graphs, PLACES_OF: places_of_graph(576)}), tmp_path):
        (ranges,) = job.optimisation_profiles.values()
        # TensorRT's limit (NvInfer.h, `addInput`).
        assert all(prod(one.max) < 1 << 31 for one in ranges.values()), job.model.graph
        TensorRTRTX(COMPUTE_CAPABILITIES[:1]).build(job, tmp_path / job.model.graph, SILENT)


@pytest.mark.slow
def test_engines_have_the_small_graphs(tmp_path: Path) -> None:
    bundle = export_random(tmp_path, CONFIG, precision="fp16", budgets=("retain-64",), dialect="opset24")
    folder = tmp_path / "built" / "engines"
    built = build_engines(bundle, folder, TensorRTRTX(COMPUTE_CAPABILITIES[:1]), Limits(60, 30, 1))
    assert {*built.engines} == {*bundle.manifest.graphs, "frames", "frames-rows-first", BEST}
    read_engines(folder).verify()
    assert [*folder.parent.iterdir()] == [folder]


@pytest.mark.parametrize(("dialect", "fused"), [("opset24", ["prefill", "decode"]), ("opset20", ["prefill"])])
def test_attention_to_a_cache_is_fused(
    dialect: str, fused: list[str], graphs: Callable[[str, str], Graphs], tmp_path: Path
) -> None:
    bundle = graphs(dialect, "fp16").bundle
    profiles = optimisation_profiles(bundle.manifest, LIMITS)["decoder_0"]
    for name, profile in profiles.items():
        job = BuildJob(Model.of_bundle(bundle, "decoder_0"), {name: profile})
        TensorRTRTX(COMPUTE_CAPABILITIES[:1]).build(job, tmp_path / name, SILENT)
    assert [name for name in profiles if FUSED_ATTENTION in (tmp_path / name).read_bytes()] == fused


UNLIKE = ("sinkpruner", "visionzip", "dart", "divprune", "sparsevlm", "prunesid", "vscan")
"""Methods that have all operators of the other methods too."""


@pytest.mark.parametrize(
    ("dialect", "precision", "method"),
    # test_family_engines.py checks all of opset20 for TensorRT 10.3.
    slow_except(
        {("opset24", "fp16", "sinkpruner"), *product(["opset20"], ["fp16"], UNLIKE)},
        [*product(DIALECTS, ["fp16"], ALL_METHODS), ("opset20", "fp32", "sinkpruner")],
    ),
)
def test_every_plan_of_a_method_compiles(
    dialect: str, precision: str, method: str, graphs: Callable[[str, str], Graphs], tmp_path: Path
) -> None:
    found = graphs(dialect, precision)
    for graph in of_method(found.bundle, method):
        if graph in found.one_of_each:
            compile_graph(found.bundle, graph, tmp_path)


@pytest.mark.parametrize(
    ("dialect", "weights"), slow_except({("opset20", "int4")}, product(DIALECTS, ("int8", "int4")))
)
def test_quantised_weights_compile(dialect: str, weights: str, tmp_path: Path) -> None:
    options = {"precision": "fp16", "dialect": dialect, "weights": weights, "vision_weights": "int8"}
    # Wide enough that weights, not code, are most of an engine.
    wide = {**CONFIG["text_config"], "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
    bundle = export_random(tmp_path, {**CONFIG, "text_config": wide}, budgets=("retain-64",), **options)
    for graph in ("vision", "projector", "decoder_1", "head"):
        engine = compile_graph(bundle, graph, tmp_path)
        if graph == "decoder_1":
            # Not folded into floats, which would be four or two times as large.
            assert len(engine) < 1.8 * bundle.manifest.weight_bytes(graph)


@pytest.mark.parametrize(("dialect", "precision"), slow_except({("opset24", "fp16")}, KINDS))
def test_a_tower_that_merges_compiles(dialect: str, precision: str, tmp_path: Path) -> None:
    merging = {"budgets": ("retain-32+tower",), "dialect": dialect}
    bundle = export_random(tmp_path, CONFIG, precision=precision, **merging)
    sizes = optimisation_profiles(bundle.manifest, LIMITS)
    assert sizes[MERGING_TOWER] == sizes[TOWER]
    engine = compile_graph(bundle, MERGING_TOWER, tmp_path)
    assert (FUSED_ATTENTION in engine) == (precision == "fp16")
    compile_graph(bundle, "sinkpruner/retain-32+tower/sanitizer", tmp_path)
