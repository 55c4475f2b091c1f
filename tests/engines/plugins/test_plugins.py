"""The plugins work in the real binding classes of TensorRT-RTX, and graphs that are adapted to them compute the same.

`FakeRunner` takes launches in place of a GPU. Shape expressions, which only a builder with plugins can make, are
plain values. TensorRT-RTX's real parser calls our creator, and then aborts its process, because its network takes no
plugins. So that test has its own process, and networks with a plugin are stand-ins.
"""

from __future__ import annotations

import gc
import platform
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from support.models.graphs import sanitizer_graph
from support.references import reference

if platform.machine() != "x86_64":
    pytest.skip("tensorrt-rtx has wheels for x86-64 only", allow_module_level=True)

import tensorrt_rtx as trt

from sinkprune.contract.budgets import parse_budget
from sinkprune.contract.errors import BackendError, EnginesError
from sinkprune.engines.plugin_graph import for_plugins, realisations
from sinkprune.engines.plugins import plugin_v3 as registry
from sinkprune.engines.plugins.launches import (
    NAMESPACE,
    PLUGINS,
    VERSION,
    Launch,
    diversity_launches,
    diversity_workspace,
    sha256,
    top_rho_launches,
)
from sinkprune.engines.plugins.plugin_v3 import creator

Array = np.ndarray[Any, Any]
TOP_RHO, DIVERSITY_SELECT = PLUGINS.values()
TYPES = trt.DataType
G, N, D, R, COUNT = 2, 37, 48, 5, 9


@dataclass
class FakeRunner:
    """Records launches in place of a GPU."""

    prepared: list[Launch] = field(default_factory=list)
    enqueued: list[tuple[Launch, int]] = field(default_factory=list)

    def prepare(self, launches: Sequence[Launch]) -> None:
        self.prepared.extend(launches)

    def run(self, launches: Sequence[Launch], stream: int) -> None:
        self.enqueued.extend((launch, stream) for launch in launches)


# Shape expressions are plain values here.
LIBRARY = SimpleNamespace(**{**vars(trt), "DimsExprs": lambda length: [None] * length})
EXPRESSIONS = SimpleNamespace(constant=lambda value: value)


def fields(**values: int) -> list[Any]:
    """Return fields as the parser makes them from INT attributes; collections point into them."""
    int32 = trt.PluginFieldType.INT32
    return [trt.PluginField(name, np.array([value], np.int32), int32) for name, value in values.items()]


def make(description: Any, runner: FakeRunner | None = None, library: Any = trt, **values: int) -> Any:
    made, given = creator(library, description, runner or FakeRunner()), fields(**values)
    return made.create_plugin("node", trt.PluginFieldCollection(given), trt.TensorRTPhase.BUILD)


def described(dtype: Any, shape: Sequence[int], layout: Any = trt.TensorFormat.LINEAR) -> Any:
    found = trt.PluginTensorDesc()
    found.type, found.dims, found.format = dtype, trt.Dims(shape), layout
    return found


def dynamic(dtype: Any, shape: Sequence[int], layout: Any = trt.TensorFormat.LINEAR) -> Any:
    found = trt.DynamicPluginTensorDesc()
    found.desc = described(dtype, [-1, *shape[1:]], layout)
    found.min, found.opt, found.max = (trt.Dims([groups, *shape[1:]]) for groups in (1, 1, shape[0]))
    return found


def top_rho_io(tokens: Any = TYPES.HALF, desc: Any = described) -> tuple[list[Any], list[Any]]:
    return (
        [desc(TYPES.FLOAT, (G, N)), desc(tokens, (G, N, D))],
        [desc(tokens, (G, 1, D)), desc(TYPES.INT32, (G, N))],
    )


def diversity_io(tokens: Any = TYPES.HALF, desc: Any = described) -> tuple[list[Any], list[Any]]:
    return (
        [desc(tokens, (G, N, D)), desc(TYPES.INT32, (G, N)), desc(TYPES.INT64, (G, R))],
        [desc(TYPES.INT64, (G, COUNT))],
    )


@pytest.fixture
def clean_registry() -> Iterator[Any]:
    """Yield TensorRT-RTX's registry of plugins, and then remove the plugins of a test from it."""
    found = trt.get_plugin_registry()
    yield found
    for description in PLUGINS.values():
        left = found.get_creator(description.name, VERSION, NAMESPACE)
        if left is not None:
            found.deregister_creator(left)


@pytest.mark.parametrize("description", PLUGINS.values(), ids=PLUGINS)
def test_the_bindings_find_every_method_they_call(description: Any) -> None:
    """pybind11 calls a method only if it is a Python method."""
    plugin = make(description, **dict.fromkeys(description.attributes, 16))
    methods = [
        *("clone", "get_capability_interface", "get_output_data_types", "get_output_shapes", "get_workspace_size"),
        *("supports_format_combination", "configure_plugin", "get_valid_tactics", "set_tactic", "on_shape_change"),
        *("enqueue", "attach_to_context", "get_fields_to_serialize"),
    ]
    assert all(type(getattr(plugin, method)).__name__ == "method" for method in methods)


def test_fields_that_do_not_fit_are_refused() -> None:
    for values in ({}, {"count": 4}, {"rounds": 0}, {"rounds": 8, "count": -1}, {"rounds": 8, "per_mille": 10}):
        with pytest.raises(EnginesError, match=r"DiversitySelect of node 'node' was given .* expected rounds"):
            make(DIVERSITY_SELECT, **values)


@pytest.mark.parametrize("values", [{"rounds": 8}, {"rounds": 2, "count": COUNT}])
def test_what_is_serialised_makes_the_same_plugin_again(values: dict[str, int]) -> None:
    runner = FakeRunner()
    made, given = creator(trt, DIVERSITY_SELECT, runner), fields(**values)
    built = made.create_plugin("node", trt.PluginFieldCollection(given), trt.TensorRTPhase.BUILD)
    copy = built.clone().attach_to_context(None)
    del built
    gc.collect()
    stored = copy.get_fields_to_serialize()
    assert {stored[i].name: list(stored[i].data) for i in range(len(stored))} == {k: [v] for k, v in values.items()}
    assert copy is not copy.clone()
    loaded = made.create_plugin("node", stored, trt.TensorRTPhase.RUNTIME)
    for plugin in (copy, loaded):
        plugin.enqueue(*diversity_io(), [64, 128, 192], [256], 320, 7)
    half = len(runner.enqueued) // 2
    assert runner.enqueued[:half] == runner.enqueued[half:] != []


def accepted(plugin: Any, inputs: list[Any], outputs: list[Any]) -> list[bool]:
    io = [*inputs, *outputs]
    return [plugin.supports_format_combination(place, io, len(inputs)) for place in range(len(io))]


def test_shapes_and_workspace() -> None:
    plugin = make(TOP_RHO, library=LIBRARY, per_mille=10)
    assert plugin.get_output_shapes([["g", "n"], ["g", "n", "d"]], [], EXPRESSIONS) == [["g", 1, "d"], ["g", "n"]]
    assert plugin.get_workspace_size(*top_rho_io(desc=dynamic)) == 0
    inputs = [["g", "n", "d"], ["g", "n"], ["g", "r"]]
    for values, given, count in (({"count": COUNT}, [], COUNT), ({}, [["value of count"]], "value of count")):
        plugin = make(DIVERSITY_SELECT, library=LIBRARY, rounds=8, **values)
        assert plugin.get_output_shapes(inputs, given, EXPRESSIONS) == [["g", count]]
    # For the largest shapes
    assert plugin.get_workspace_size(*diversity_io(desc=dynamic)) == diversity_workspace(G, N) > 0


@pytest.mark.parametrize("tokens", [TYPES.FLOAT, TYPES.HALF, TYPES.BF16])
def test_formats_that_are_taken_and_types_of_outputs(tokens: Any) -> None:
    top, plugin = make(TOP_RHO, per_mille=10), make(DIVERSITY_SELECT, rounds=8)
    assert top.get_output_data_types([TYPES.FLOAT, tokens]) == [tokens, TYPES.INT32]
    assert plugin.get_output_data_types([tokens, TYPES.INT32, TYPES.INT64]) == [TYPES.INT64]
    assert all(accepted(top, *top_rho_io(tokens, dynamic)))
    inputs, outputs = diversity_io(tokens, dynamic)
    assert all(accepted(plugin, inputs, outputs))
    # A shape input would follow the inputs.
    assert all(accepted(plugin, [*inputs, dynamic(TYPES.INT64, (1,))], outputs))


def test_formats_that_are_refused() -> None:
    for place, wrong in (
        (0, dynamic(TYPES.INT8, (G, N, D))),
        (0, dynamic(TYPES.HALF, (G, N, D), trt.TensorFormat.CHW2)),
        (1, dynamic(TYPES.BOOL, (G, N))),
        (2, dynamic(TYPES.INT32, (G, R))),
        (3, dynamic(TYPES.INT32, (G, COUNT))),
        (3, dynamic(TYPES.INT64, (G, COUNT), trt.TensorFormat.CHW2)),
    ):
        inputs, outputs = diversity_io(desc=dynamic)
        io = [*inputs, *outputs]
        io[place] = wrong
        assert not accepted(make(DIVERSITY_SELECT, rounds=8), io[:3], io[3:])[place], (place, wrong)


def enqueued(plugin: Any, io: tuple[list[Any], list[Any]], runner: FakeRunner) -> list[Launch]:
    """Enqueue on stream 99, with addresses of 1 << 40 and on, and return the launches. All kernels are prepared."""
    inputs, outputs = io
    places = [place << 40 for place in range(1, 6)]
    plugin.on_shape_change(inputs, outputs)
    plugin.enqueue(inputs, outputs, places[: len(inputs)], places[len(inputs) : 4], places[4], 99)
    launches = [launch for launch, _ in runner.enqueued]
    assert {stream for _, stream in runner.enqueued} == {99}
    assert {launch.kernel for launch in runner.prepared} == {launch.kernel for launch in launches}
    return launches


def test_launches_are_enqueued_on_the_stream_that_is_given() -> None:
    addresses = {name: place << 40 for place, name in enumerate(("norms", "tokens", "sink", "outlier"), 1)}
    for per_mille, count in ((10, 1), (28, 2), (1000, N)):
        runner = FakeRunner()
        found = enqueued(make(TOP_RHO, runner, per_mille=per_mille), top_rho_io(TYPES.BF16), runner)
        assert found == top_rho_launches(addresses, {"G": G, "N": N, "D": D, "count": count}, "bfloat16")
    names = ("tokens", "candidate", "reserved", "chosen", "workspace")
    addresses = {name: place << 40 for place, name in enumerate(names, 1)}
    sizes = {"G": G, "N": N, "D": D, "R": R, "count": COUNT, "rounds": 2}
    for values in ({"rounds": 2}, {"rounds": 2, "count": COUNT}):
        runner = FakeRunner()
        found = enqueued(make(DIVERSITY_SELECT, runner, **values), diversity_io(TYPES.FLOAT), runner)
        assert found == diversity_launches(addresses, sizes, "float32") and len(found) == 5


def test_registering_keeps_creators_alive_and_returns_sums_of_kernels(clean_registry: Any) -> None:
    # The runtime finds them where they are installed.
    (found,) = entry_points(group="sinkprune.tensorrt_plugins")
    assert found.load() is registry.register
    expected = {"TopRho": sha256("TopRho"), "DiversitySelect": sha256("DiversitySelect")}
    assert registry.register(trt) == expected
    alive = weakref.ref(clean_registry.get_creator("TopRho", VERSION, NAMESPACE))
    gc.collect()
    assert alive() is not None
    assert registry.register(trt) == expected
    assert clean_registry.get_creator("TopRho", VERSION, NAMESPACE) is alive()
    assert clean_registry.get_creator("TopRho", VERSION, "") is None
    refusing = SimpleNamespace(get_creator=lambda *_: None, register_creator=lambda *_: False)
    content = {"__name__": "tensorrt", "__version__": "10.3.0", "get_plugin_registry": lambda: refusing}
    with pytest.raises(BackendError, match=r"tensorrt 10\.3\.0 does not register the plugin TopRho"):
        registry.register(SimpleNamespace(**{**vars(trt), **content}))


TOKENS, WIDTH = 80, 32
BEFORE, SINCE = (10, 3), (10, 7)
"""Versions of TensorRT in which functions win, and in which plugins do."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    """The sanitizer of retain-64, for groups of 80 tokens."""
    folder = tmp_path_factory.mktemp("plugin_graph")
    spec = sanitizer_graph(TOKENS, WIDTH, parse_budget("llava", "retain-64")).save(folder, "sanitizer.onnx")
    return onnx.load(folder / spec.file)


def node_of(model: onnx.ModelProto, operator: str) -> onnx.NodeProto:
    (node,) = (node for node in model.graph.node if node.op_type == operator)
    return node


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


@pytest.mark.parametrize(("version", "functions"), [(BEFORE, set()), (SINCE, {"TopRho", "DiversitySelect"})])
def test_nodes_are_named_for_the_parser_and_functions_that_would_win_are_stripped(
    model: onnx.ModelProto, version: tuple[int, ...], functions: set[str]
) -> None:
    before = model.SerializeToString()
    fitted = for_plugins(model, version)
    named = {"plugin_namespace": b"sinkprune", "plugin_version": b"1"}
    assert attributes(node_of(fitted, "TopRho")) == {"per_mille": 10, **named}
    node = node_of(fitted, "DiversitySelect")
    assert attributes(node) == {"rounds": 8, "count": 64 * TOKENS // 576, **named}
    assert len(node.input) == 3
    assert {function.name for function in fitted.functions} == functions
    assert model.SerializeToString() == before
    # A computed count is a shape input.
    changed = deepcopy(model)
    node_of(changed, "DiversitySelect").input[3] = "count"
    changed.graph.input.append(helper.make_tensor_value_info("count", TensorProto.INT64, [1]))
    node = node_of(for_plugins(changed, version), "DiversitySelect")
    assert attributes(node) == {"rounds": 8, "tensorrt_plugin_shape_input_indices": [3], **named}
    assert list(node.input)[3:] == ["count"]
    # Each node needs a plugin and a name of its own.
    node = node_of(changed, "TopRho")
    node.op_type = "TopTau"
    with pytest.raises(EnginesError, match=r"no plugin is known for node 'TopRho_node_0', TopTau .* TopRho, Divers"):
        for_plugins(changed, version)
    for name, said in (("DiversitySelect_node_14", "2 nodes of domain sinkprune and 1 names"), ("", "needs its own")):
        node.name = name
        with pytest.raises(EnginesError, match=said):
            for_plugins(changed, version)


class TopRho(OpRun):
    """The plugin's node, by the numpy reference."""

    op_domain = "sinkprune"

    def _run(self, norms: Array, tokens: Array, per_mille: int, **names: str) -> tuple[Array, Array]:
        rows = np.arange(norms.shape[1])
        top = [reference.largest(own, max(1, -(-len(rows) * per_mille // 1000))) for own in norms]
        sink = np.stack([own[index].mean(axis=0, keepdims=True) for own, index in zip(tokens, top, strict=True)])
        return sink.astype(tokens.dtype), np.stack([np.isin(rows, index) for index in top]).astype(np.int32)


class DiversitySelect(OpRun):
    """The plugin's node, by the numpy reference, with the inputs of the plugin."""

    op_domain = "sinkprune"

    def _run(
        self, tokens: Array, candidate: Array, reserved: Array, rounds: int, count: int, **names: str
    ) -> tuple[Array]:
        assert (candidate.dtype, reserved.dtype) == (np.int32, np.int64)
        chosen = [
            sorted(reference.diversity(rows, np.flatnonzero(mask).tolist(), kept.tolist(), count, rounds))
            for rows, mask, kept in zip(tokens, candidate, reserved, strict=True)
        ]
        return (np.array(chosen),)


def test_the_fitted_graph_computes_what_the_exported_one_does(model: onnx.ModelProto) -> None:
    rng = np.random.default_rng(4)
    tokens = rng.normal(size=(2, TOKENS, WIDTH)).astype(np.float32)
    inputs = {
        "tokens": tokens,
        "norms": np.linalg.norm(tokens, axis=-1),
        "salience": rng.random((2, TOKENS), dtype=np.float32),
    }
    fitted = for_plugins(model, BEFORE)
    onnx.checker.check_model(fitted)
    expected = ReferenceEvaluator(model).run(None, inputs)
    found = ReferenceEvaluator(fitted, new_ops=[TopRho, DiversitySelect]).run(None, inputs)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found[1], expected[1])


TOP, DIVERSE = "TopRho_node_0", "DiversitySelect_node_14"


def network_of(*layers: tuple[str, Any, str]) -> Any:
    """Return a network of full TensorRT with these layers, which may be plugins."""
    made = [SimpleNamespace(name=name, type=kind, metadata=f"[ONNX Layer: {words}]") for name, kind, words in layers]
    return SimpleNamespace(num_layers=len(made), get_layer=made.__getitem__)


def test_plugins_differ_from_functions(model: onnx.ModelProto) -> None:
    # The real parser of TensorRT-RTX makes no plugins.
    log = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(log)
    network = builder.create_network(0)
    assert trt.OnnxParser(network, log).parse(model.SerializeToString())
    assert realisations(model, network, trt) == {TOP: "function", DIVERSE: "function"}
    top, diverse = ((name, trt.LayerType.PLUGIN_V3, name) for name in (TOP, DIVERSE))
    for version, realisation in ((SINCE, "plugin"), (BEFORE, "stripped")):
        found = realisations(for_plugins(model, version), network_of(top, diverse), trt)
        assert found == {TOP: realisation, DIVERSE: realisation}
    inlined = ("Div_2", trt.LayerType.ELEMENTWISE, "Div_2 | Local Function: DiversitySelect")
    assert realisations(model, network_of(top, inlined), trt) == {TOP: "plugin", DIVERSE: "function"}
    with pytest.raises(EnginesError, match=f"no layer of TensorRT's network stands for node '{DIVERSE}'"):
        realisations(model, network_of(top, (DIVERSE, trt.LayerType.CAST, DIVERSE)), trt)


PARSE = """
import sys
import tensorrt_rtx as trt
from sinkprune.engines.plugins.launches import NAMESPACE, PLUGINS
from sinkprune.engines.plugins.plugin_v3 import creator

plugin = PLUGINS[sys.argv[2]]

class Talking(type(creator(trt, plugin, None))):
    def create_plugin(self, name, fields, phase):
        values = {field.name: (field.type.name, field.data.tolist()) for field in fields}
        plugin = super().create_plugin(name, fields, phase)
        print("created", plugin.plugin_name, "for", name, values, phase.name, flush=True)
        return plugin

made = Talking(trt, plugin, None)
assert trt.get_plugin_registry().register_creator(made, NAMESPACE)
log = trt.Logger(trt.Logger.ERROR)
network = trt.Builder(log).create_network(0)
with open(sys.argv[1], "rb") as file:
    trt.OnnxParser(network, log).parse(file.read())
"""


@pytest.mark.parametrize("version", [BEFORE, SINCE])
@pytest.mark.parametrize(
    ("operator", "created"),
    [
        ("TopRho", f"{TOP} {{'per_mille': ('INT32', [10])}}"),
        ("DiversitySelect", f"{DIVERSE} {{'rounds': ('INT32', [8]), 'count': ('INT32', [8])}}"),
    ],
)
def test_the_real_parser_creates_our_plugin(
    model: onnx.ModelProto, tmp_path: Path, version: tuple[int, ...], operator: str, created: str
) -> None:
    """TensorRT-RTX, like TensorRT since 10.7, prefers the plugin to a function in the file."""
    fitted = for_plugins(model, version)
    # The other node needs its function, because it has no plugin here.
    others = [function for function in model.functions if function.name != operator]
    if version < SINCE:
        fitted.functions.extend(others)
    path = tmp_path / "fitted.onnx"
    path.write_bytes(fitted.SerializeToString())
    command = [sys.executable, "-c", PARSE, str(path), operator]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert f"created {operator} for {created} BUILD" in result.stdout, result.stdout + result.stderr
