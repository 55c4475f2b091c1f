"""TensorRT's parser and compiler accept every fp16 graph, for prefill and decode, on three generations of GPUs.

Those of dialect `trt10` they accept in fp32 too. The builder is the one of `sinkprune-build`, with its profiles; it
compares each network with the contract, and refuses inputs that no layer reads.

TensorRT-RTX builds ahead of time without a GPU. It shares its front end with TensorRT 11, so a graph it refuses would
be refused there; that one compiles says nothing about its numbers or its speed.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from heads_of_64 import CONFIG, export_random

if platform.machine() != "x86_64":
    pytest.skip("tensorrt-rtx has wheels for x86-64 only", allow_module_level=True)

from sinkprune.bundle import Bundle
from sinkprune.engines.limits import profiles
from sinkprune.engines.progress import SilentProgress
from sinkprune.engines.targets import Job
from sinkprune.engines.targets.tensorrt import TensorRTBuilder
from sinkprune.engines.targets.tensorrt_libraries import TensorRTRTX
from sinkprune.engines_manifest import Limits
from sinkprune.export.dialects import DIALECTS
from sinkprune.export.methods import all_methods

BUDGETS = ("retain-192", "retain-128", "retain-64", "retain-32", "retain-64+raster+visual-keys+compact")
TRT10_BUDGETS = (BUDGETS[2], BUDGETS[-1])


def graph_names(budgets: Sequence[str]) -> list[str]:
    """The graphs of a bundle with four segments."""
    weighted = ("vision", "projector", "decoder_0", "decoder_1", "decoder_2", "decoder_3", "head")
    planned = ("sanitizer", "select_after_0", "select_after_1", "select_after_2")
    return [*weighted, *(f"sinkpruner/{budget}/{graph}" for budget in budgets for graph in planned)]


# The kernel's name, as it stands in a plan.
FUSED_ATTENTION = b"_gemm_mha_v2"
COMPUTE_CAPABILITIES = (86, 89, 120)
LIMITS = Limits(prompt_tokens=1400, new_tokens=400, images=5)

# The ablations are SinkPruner's own graphs with other counts.
OTHER_METHODS = [name for name in all_methods() if not name.startswith("sinkpruner")]


@pytest.fixture(scope="module")
def fp16_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export_random(tmp_path_factory.mktemp("rtx"), budgets=BUDGETS, precision="fp16")


def compile_graph(bundle: Bundle, graph: str, folder: Path) -> bytes:
    """The plan of a graph, each node of domain `sinkprune` by its function; RTX takes no plugins."""
    spec, path = bundle.manifest.graphs[graph], bundle.graph_path(graph)
    builder = TensorRTBuilder(TensorRTRTX(COMPUTE_CAPABILITIES))
    job = Job(graph, path, spec, profiles(bundle.manifest, LIMITS, graph))
    built = builder.build(job, folder / "plan", SilentProgress())
    assert list(built.profiles) == (["prefill", "decode"] if graph.startswith(("decoder_", "head")) else ["prefill"])
    assert set(built.nodes.values()) <= {"function"}
    assert builder.plugins == {}
    return (folder / "plan").read_bytes()


def test_every_graph_is_listed(fp16_bundle: Bundle) -> None:
    assert set(fp16_bundle.manifest.graphs) == set(graph_names(BUDGETS))


@pytest.mark.parametrize("name", graph_names(BUDGETS))
def test_graph_compiles(name: str, fp16_bundle: Bundle, tmp_path: Path) -> None:
    compile_graph(fp16_bundle, name, tmp_path)


@pytest.fixture(scope="module")
def trt10_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bundle]:
    """The same model lowered for TensorRT 10.3, in a precision."""
    made: dict[str, Bundle] = {}

    def get(precision: str) -> Bundle:
        if precision not in made:
            folder = tmp_path_factory.mktemp("trt10")
            made[precision] = export_random(folder, budgets=TRT10_BUDGETS, precision=precision, dialect="trt10")
        return made[precision]

    return get


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("name", graph_names(TRT10_BUDGETS))
def test_trt10_graph_compiles(
    name: str, precision: str, trt10_bundle: Callable[[str], Bundle], tmp_path: Path
) -> None:
    plan = compile_graph(trt10_bundle(precision), name, tmp_path)
    # TensorRT has fused kernels for attention in fp16, none for fp32.
    has_attention = name == "vision" or name.startswith("decoder_")
    assert (FUSED_ATTENTION in plan) == (has_attention and precision == "fp16")


@pytest.fixture(scope="module")
def bundle_of_methods(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bundle]:
    """Every method, on a decoder deep enough for all of them, in a dialect."""
    made: dict[str, Bundle] = {}
    deep = {**CONFIG, "text_config": {**CONFIG["text_config"], "num_hidden_layers": 8}}
    methods, budgets = tuple(all_methods()), ("retain-192", "retain-64+raster+serial+visual-keys+compact")

    def get(dialect: str) -> Bundle:
        if dialect not in made:
            folder = tmp_path_factory.mktemp("methods")
            request = {"budgets": budgets, "methods": methods, "precision": "fp16", "dialect": dialect}
            made[dialect] = export_random(folder, deep, **request)
        return made[dialect]

    return get


@pytest.mark.parametrize("method", OTHER_METHODS)
def test_other_methods_compile(method: str, bundle_of_methods: Callable[[str], Bundle], tmp_path: Path) -> None:
    bundle = bundle_of_methods("onnx24")
    plan = bundle.manifest.plans[method]["retain-192"]
    # The selects of a plan differ in a number.
    graphs = [graph for graph in (plan.sanitizer, *plan.select_after.values()) if graph]
    compile_graph(bundle, graphs[0], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("method", all_methods())
def test_every_graph_of_every_method_compiles_everywhere(
    method: str, dialect: str, bundle_of_methods: Callable[[str], Bundle], tmp_path: Path
) -> None:
    bundle = bundle_of_methods(dialect)
    for plan in bundle.manifest.plans[method].values():
        for graph in filter(None, [plan.sanitizer, *plan.select_after.values()]):
            compile_graph(bundle, graph, tmp_path)
