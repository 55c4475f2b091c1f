"""A graph that is adapted to the plugins computes the same, and the network shows what each node became.

TensorRT-RTX's real parser calls our creator, and then aborts its process, because its network takes no plugins. So
that test has its own process, and networks with a plugin are a `FakeNetwork`.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
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
from sinkprune.contract.errors import EnginesError
from sinkprune.engines.plugin_graph import custom_nodes, for_plugins, realisations

Array = np.ndarray[Any, Any]
N, D = 80, 32
BEFORE, SINCE = (10, 3), (10, 7)
"""Versions of TensorRT in which functions win, and in which plugins do."""


def sanitizer_model(folder: Path) -> onnx.ModelProto:
    """Export the sanitizer of retain-64, for groups of N tokens."""
    spec = sanitizer_graph(N, D, parse_budget("llava", "retain-64")).save(folder, "sanitizer.onnx")
    return onnx.load(folder / spec.file)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    return sanitizer_model(tmp_path_factory.mktemp("plugin_graph"))


def node_of(model: onnx.ModelProto, operator: str) -> onnx.NodeProto:
    (node,) = (node for node in model.graph.node if node.op_type == operator)
    return node


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


@pytest.mark.parametrize("version", [BEFORE, SINCE])
def test_nodes_are_named_for_the_parser(model: onnx.ModelProto, version: tuple[int, ...]) -> None:
    fitted = for_plugins(model, version)
    named = {"plugin_namespace": b"sinkprune", "plugin_version": b"1"}
    assert attributes(node_of(fitted, "TopRho")) == {"per_mille": 10, **named}
    node = node_of(fitted, "DiversitySelect")
    count = 64 * N // 576
    assert attributes(node) == {"rounds": 8, "count": count, **named}
    assert len(node.input) == 3


def test_functions_are_stripped_where_they_would_win(model: onnx.ModelProto) -> None:
    before = model.SerializeToString()
    assert [function.name for function in for_plugins(model, BEFORE).functions] == []
    assert {function.name for function in for_plugins(model, SINCE).functions} == {
        "TopRho",
        "DiversitySelect",
    }
    assert model.SerializeToString() == before


def with_computed_count(model: onnx.ModelProto) -> onnx.ModelProto:
    changed = deepcopy(model)
    node_of(changed, "DiversitySelect").input[3] = "count"
    changed.graph.input.append(helper.make_tensor_value_info("count", TensorProto.INT64, [1]))
    return changed


def test_a_computed_count_is_a_shape_input(model: onnx.ModelProto) -> None:
    changed = with_computed_count(model)
    fitted = for_plugins(changed, BEFORE)
    node = node_of(fitted, "DiversitySelect")
    assert attributes(node)["tensorrt_plugin_shape_input_indices"] == [3]
    assert "count" not in attributes(node)
    assert list(node.input)[3:] == ["count"]


class TopRho(OpRun):
    """The plugin's node, by the numpy reference."""

    op_domain = "sinkprune"

    def _run(self, norms: Array, tokens: Array, per_mille: int, **names: str) -> tuple[Array, Array]:
        count = max(1, -(-norms.shape[1] * per_mille // 1000))
        top = [reference.largest(row, count) for row in norms]
        mask = np.zeros(norms.shape, np.int32)
        for group, index in enumerate(top):
            mask[group, index] = 1
        sink = np.stack([rows[index].mean(axis=0, keepdims=True) for rows, index in zip(tokens, top, strict=True)])
        return sink.astype(tokens.dtype), mask


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
    tokens = rng.normal(size=(2, N, D)).astype(np.float32)
    inputs = {
        "tokens": tokens,
        "norms": np.linalg.norm(tokens, axis=-1),
        "salience": rng.random((2, N), dtype=np.float32),
    }
    fitted = for_plugins(model, BEFORE)
    onnx.checker.check_model(fitted)
    expected = ReferenceEvaluator(model).run(None, inputs)
    found = ReferenceEvaluator(fitted, new_ops=[TopRho, DiversitySelect]).run(None, inputs)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found[1], expected[1])


def test_a_node_without_a_name_of_its_own_is_refused(model: onnx.ModelProto) -> None:
    changed = deepcopy(model)
    node_of(changed, "TopRho").name = node_of(changed, "DiversitySelect").name
    with pytest.raises(EnginesError, match="2 nodes of domain sinkprune and 1 names"):
        for_plugins(changed, SINCE)
    node_of(changed, "TopRho").name = ""
    with pytest.raises(EnginesError, match="each needs its own"):
        custom_nodes(changed)


def test_an_operator_without_a_plugin_is_refused(model: onnx.ModelProto) -> None:
    changed = deepcopy(model)
    node_of(changed, "TopRho").op_type = "TopTau"
    with pytest.raises(
        EnginesError, match=r"no plugin is known for node 'TopRho_node_0', TopTau .* TopRho, Diversity"
    ):
        for_plugins(changed, SINCE)


def parsed(model: onnx.ModelProto) -> Any:
    """Return the builder, parser and network of `model` in TensorRT-RTX."""
    log = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(log)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, log)
    assert parser.parse(model.SerializeToString())
    return builder, parser, network


def test_nodes_that_the_real_parser_inlines_are_functions(model: onnx.ModelProto) -> None:
    _builder, _parser, network = parsed(model)
    assert realisations(model, network, trt) == {"TopRho_node_0": "function", "DiversitySelect_node_14": "function"}


@dataclass
class FakeLayer:
    name: str
    type: Any
    metadata: str = ""


@dataclass
class FakeNetwork:
    """The layers of a network of full TensorRT, which may be plugins."""

    layers: list[FakeLayer] = field(default_factory=list)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def get_layer(self, number: int) -> FakeLayer:
        return self.layers[number]


def plugin_layer(name: str) -> FakeLayer:
    return FakeLayer(name, trt.LayerType.PLUGIN_V3, f"[ONNX Layer: {name}]")


def test_plugins_differ_from_functions(model: onnx.ModelProto) -> None:
    both = FakeNetwork([plugin_layer("TopRho_node_0"), plugin_layer("DiversitySelect_node_14")])
    for version, realisation in ((SINCE, "plugin"), (BEFORE, "stripped")):
        found = realisations(for_plugins(model, version), both, trt)
        assert found == {"TopRho_node_0": realisation, "DiversitySelect_node_14": realisation}

    inlined = FakeLayer("Div_2", trt.LayerType.ELEMENTWISE, "[ONNX Layer: Div_2 | Local Function: DiversitySelect]")
    mixed = FakeNetwork([plugin_layer("TopRho_node_0"), inlined])
    found = realisations(model, mixed, trt)
    assert found == {"TopRho_node_0": "plugin", "DiversitySelect_node_14": "function"}


def test_a_node_no_layer_stands_for_is_an_error(model: onnx.ModelProto) -> None:
    other = FakeLayer("DiversitySelect_node_14", trt.LayerType.CAST, "[ONNX Layer: DiversitySelect_node_14]")
    with pytest.raises(
        EnginesError, match="no layer of TensorRT's network stands for node 'DiversitySelect_node_14'"
    ):
        realisations(model, FakeNetwork([plugin_layer("TopRho_node_0"), other]), trt)


PARSE = """
import sys
import tensorrt_rtx as trt
from sinkprune.engines.plugins.descriptions import NAMESPACE, PLUGINS
from sinkprune.engines.plugins.plugin_v3 import creator

class Talking(type(creator(trt, PLUGINS[0], None))):
    def create_plugin(self, name, fields, phase):
        values = {field.name: (field.type.name, field.data.tolist()) for field in fields}
        plugin = super().create_plugin(name, fields, phase)
        print("created", plugin.plugin_name, "for", name, values, phase.name, flush=True)
        return plugin

creators = [Talking(trt, plugin, None) for plugin in PLUGINS if plugin.name == sys.argv[2]]
assert trt.get_plugin_registry().register_creator(creators[0], NAMESPACE)
log = trt.Logger(trt.Logger.ERROR)
network = trt.Builder(log).create_network(0)
with open(sys.argv[1], "rb") as file:
    trt.OnnxParser(network, log).parse(file.read())
"""


@pytest.mark.parametrize("version", [BEFORE, SINCE])
@pytest.mark.parametrize(
    ("operator", "created"),
    [
        ("TopRho", "created TopRho for TopRho_node_0 {'per_mille': ('INT32', [10])} BUILD"),
        (
            "DiversitySelect",
            "created DiversitySelect for DiversitySelect_node_14 {'rounds': ('INT32', [8]), 'count': ('INT32', [8])} "
            "BUILD",
        ),
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
    assert created in result.stdout, result.stdout + result.stderr
