"""TensorRT's parser and compiler accept every fp16 graph, for prefill and decode, on three generations of GPUs.

Those of dialect `trt10` they accept in fp32 too.

TensorRT-RTX builds ahead of time without a GPU. It shares its front end with TensorRT 11, so a graph it refuses would
be refused there; that one compiles says nothing about its numbers or its speed.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

if platform.machine() != "x86_64":
    pytest.skip("tensorrt-rtx has wheels for x86-64 only", allow_module_level=True)

import tensorrt_rtx as trt

from sinkprune.bundle import Bundle, DialectName, GraphSpec, read_bundle
from sinkprune.export.bundle_writer import Request, export_bundle
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
COMPUTE_CAPABILITIES = ("SM86", "SM89", "SM120")

# Smallest, usual and largest value of each dynamic dimension
PREFILL = {
    "G": (1, 1, 5),
    "n": (1, 129, 576),
    "S": (30, 180, 2000),
    "P": (0, 0, 0),
    "T": (30, 180, 2000),
    "V": (65, 129, 576),
    "L": (1, 40, 1400),
}
DECODE = {**PREFILL, "S": (1, 1, 1), "P": (30, 400, 2000)}
RUN_IN_DECODE = ("decoder_", "head")

# The ablations are SinkPruner's own graphs with other counts.
OTHER_METHODS = [name for name in all_methods() if not name.startswith("sinkpruner")]

CONFIG: dict[str, Any] = {
    "model_type": "llava",
    "image_token_index": 300,
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 336,
        "patch_size": 14,
    },
    # Heads of 64: TensorRT's attention takes no smaller ones.
    "text_config": {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 320,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
    },
}


class ErrorLog(trt.ILogger):  # type: ignore[misc]
    """What TensorRT says of severity error or worse."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []

    def log(self, severity: Any, message: str) -> None:
        if severity <= trt.ILogger.ERROR:
            self.errors.append(message)


@pytest.fixture(scope="module")
def fp16_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("rtx")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    request = Request(str(folder), budgets=BUDGETS, precision="fp16", random_weights=True)
    export_bundle(request, folder / "bundle")
    return read_bundle(folder / "bundle")


def layers_reading(network: Any) -> Iterator[str]:
    """The names of all tensors some layer reads."""
    for number in range(network.num_layers):
        layer = network.get_layer(number)
        for place in range(layer.num_inputs):
            tensor = layer.get_input(place)
            if tensor is not None:
                yield tensor.name


def add_profile(builder: Any, config: Any, spec: GraphSpec, ranges: dict[str, tuple[int, int, int]]) -> None:
    profile = builder.create_optimization_profile()
    for tensor in spec.inputs:
        shapes = [[ranges[dim][which] if isinstance(dim, str) else dim for dim in tensor.shape] for which in range(3)]
        profile.set_shape(tensor.name, *shapes)
    assert config.add_optimization_profile(profile) >= 0


def compile_graph(
    path: Path, name: str, spec: GraphSpec, capabilities: Sequence[str] = COMPUTE_CAPABILITIES
) -> bytes:
    """The plan of a graph."""
    log = ErrorLog()
    builder = trt.Builder(log)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, log)
    assert parser.parse_from_file(str(path)), log.errors
    inputs = {network.get_input(number).name for number in range(network.num_inputs)}
    outputs = {network.get_output(number).name for number in range(network.num_outputs)}
    assert inputs == {tensor.name for tensor in spec.inputs}
    assert outputs == {tensor.name for tensor in spec.outputs}
    assert inputs <= set(layers_reading(network))

    config = builder.create_builder_config()
    config.num_compute_capabilities = len(capabilities)
    for number, capability in enumerate(capabilities):
        config.set_compute_capability(getattr(trt.ComputeCapability, capability), number)
    add_profile(builder, config, spec, PREFILL)
    if name.startswith(RUN_IN_DECODE):
        add_profile(builder, config, spec, DECODE)
    plan = builder.build_serialized_network(network, config)
    assert plan is not None, log.errors
    return bytes(plan)


def test_every_graph_is_listed(fp16_bundle: Bundle) -> None:
    assert set(fp16_bundle.manifest.graphs) == set(graph_names(BUDGETS))


@pytest.mark.parametrize("name", graph_names(BUDGETS))
def test_graph_compiles(name: str, fp16_bundle: Bundle) -> None:
    compile_graph(fp16_bundle.graph_path(name), name, fp16_bundle.manifest.graphs[name])


@pytest.fixture(scope="module")
def trt10_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bundle]:
    """The same model lowered for TensorRT 10.3, in a precision."""
    made: dict[str, Bundle] = {}

    def get(precision: str) -> Bundle:
        if precision not in made:
            folder = tmp_path_factory.mktemp("trt10")
            (folder / "config.json").write_text(json.dumps(CONFIG))
            request = Request(str(folder), TRT10_BUDGETS, precision=precision, dialect="trt10", random_weights=True)
            export_bundle(request, folder / "bundle")
            made[precision] = read_bundle(folder / "bundle")
        return made[precision]

    return get


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("name", graph_names(TRT10_BUDGETS))
def test_trt10_graph_compiles(name: str, precision: str, trt10_bundle: Callable[[str], Bundle]) -> None:
    bundle = trt10_bundle(precision)
    plan = compile_graph(bundle.graph_path(name), name, bundle.manifest.graphs[name])
    # TensorRT has fused kernels for attention in fp16, none for fp32.
    has_attention = name == "vision" or name.startswith("decoder_")
    assert (FUSED_ATTENTION in plan) == (has_attention and precision == "fp16")


@pytest.fixture(scope="module")
def bundle_of_methods(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bundle]:
    """Every method, on a decoder deep enough for all of them, in a dialect."""
    made: dict[str, Bundle] = {}
    config = {**CONFIG, "text_config": {**CONFIG["text_config"], "num_hidden_layers": 8}}
    methods, budgets = tuple(all_methods()), ("retain-192", "retain-64+raster+serial+visual-keys+compact")

    def get(dialect: DialectName) -> Bundle:
        if dialect not in made:
            folder = tmp_path_factory.mktemp("methods")
            (folder / "config.json").write_text(json.dumps(config))
            request = Request(str(folder), budgets, methods, "fp16", dialect, random_weights=True)
            export_bundle(request, folder / "bundle")
            made[dialect] = read_bundle(folder / "bundle")
        return made[dialect]

    return get


@pytest.mark.parametrize("method", OTHER_METHODS)
def test_other_methods_compile(method: str, bundle_of_methods: Callable[[str], Bundle]) -> None:
    bundle = bundle_of_methods("onnx24")
    plan = bundle.manifest.plans[method]["retain-192"]
    # The selects of a plan differ in a number.
    graphs = [graph for graph in (plan.sanitizer, *plan.select_after.values()) if graph]
    spec = bundle.manifest.graphs[graphs[0]]
    compile_graph(bundle.graph_path(graphs[0]), graphs[0], spec, COMPUTE_CAPABILITIES[:1])


@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("method", all_methods())
def test_every_graph_of_every_method_compiles_everywhere(
    method: str, dialect: str, bundle_of_methods: Callable[[str], Bundle]
) -> None:
    bundle = bundle_of_methods(dialect)
    for plan in bundle.manifest.plans[method].values():
        for graph in filter(None, [plan.sanitizer, *plan.select_after.values()]):
            compile_graph(bundle.graph_path(graph), graph, bundle.manifest.graphs[graph])
