"""A graph whose functions were inlined computes what it computed, in ONNX Runtime, and knows no functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from sinkprune.contract.bundle import read_bundle
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.backends.onnxruntime.library import import_onnxruntime, session_options
from sinkprune.runtime.backends.openvino.graphs import inlined

OPSETS = [helper.make_opsetid("", 21), helper.make_opsetid("ours", 1)]
X = np.array([[3.0, -1.0, 2.0], [0.5, 4.0, -2.0]], np.float32)


def reference(name: str, target: str) -> onnx.AttributeProto:
    """The attribute `name` of a node, as the attribute `target` of the call says."""
    return onnx.AttributeProto(name=name, ref_attr_name=target, type=onnx.AttributeProto.INT)


def summed(name: str, *, default: int | None = None) -> onnx.FunctionProto:
    """Sums along the axis `along`, with or without a default."""
    node = helper.make_node("CumSum", ["v", "axis"], ["sum"])
    axis = helper.make_node("Constant", [], ["axis"])
    axis.attribute.append(reference("value_int", "along"))
    given = {} if default is None else {"attribute_protos": [helper.make_attribute("along", default)]}
    named = ["along"] if default is None else []
    return helper.make_function("ours", name, ["v"], ["sum"], [axis, node], OPSETS, attributes=named, **given)


def clipped() -> onnx.FunctionProto:
    """What is between two bounds, of which the second may be left out; and what calls two others."""
    nodes = [
        helper.make_node("Clip", ["v", "low", "high"], ["inner"]),
        helper.make_node("Rows", ["inner"], ["rows"], domain="ours"),
        helper.make_node("Rows", ["rows"], ["twice"], domain="ours", along=0),
    ]
    return helper.make_function("ours", "Clipped", ["v", "low", "high"], ["rows", "twice"], nodes, OPSETS)


def model(nodes: list[onnx.NodeProto], outputs: list[str]) -> bytes:
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "low", "high")]
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph(nodes, "graph", given, made)
    functions = [summed("Rows", default=1), summed("Along"), clipped()]
    whole = helper.make_model(graph, functions=functions, opset_imports=OPSETS, ir_version=10)
    data: bytes = whole.SerializeToString()
    return data


def computed(data: bytes) -> list[np.ndarray]:
    ort = import_onnxruntime("ort-cpu")
    session = ort.InferenceSession(data, session_options(ort), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": X, "low": np.array(-1.5, np.float32), "high": np.array(2.5, np.float32)})


CALLS: dict[str, tuple[list[onnx.NodeProto], list[str]]] = {
    "an attribute": ([helper.make_node("Along", ["x"], ["y"], domain="ours", along=0)], ["y"]),
    "its default": ([helper.make_node("Rows", ["x"], ["y"], domain="ours")], ["y"]),
    "calls in calls": ([helper.make_node("Clipped", ["x", "low", "high"], ["y", "z"], domain="ours")], ["y", "z"]),
    "an input left out at the end": (
        [helper.make_node("Clipped", ["x", "low"], ["y", "z"], domain="ours")],
        ["y", "z"],
    ),
    "an input left out before": (
        [helper.make_node("Clipped", ["x", "", "high"], ["y", "z"], domain="ours")],
        ["y", "z"],
    ),
    "an output left out": ([helper.make_node("Clipped", ["x", "low", "high"], ["", "z"], domain="ours")], ["z"]),
    "twice, and other nodes between": (
        [
            helper.make_node("Along", ["x"], ["inner"], domain="ours", along=1),
            helper.make_node("Neg", ["inner"], ["sum"]),
            helper.make_node("Along", ["sum"], ["y"], domain="ours", along=0),
        ],
        ["y"],
    ),
}


@pytest.mark.parametrize("calls", CALLS)
def test_it_computes_what_it_did(calls: str) -> None:
    data = model(*CALLS[calls])
    without = inlined(data)
    assert not onnx.load_from_string(without).functions
    for found, expected in zip(computed(without), computed(data), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_graphs_of_a_bundle_are_valid_and_small_or_stay_as_they_are(bundle: Callable[..., Path]) -> None:
    opened = read_bundle(bundle("gqa-112"))
    sanitizers = [graph for graph in opened.manifest.graphs if graph.endswith("sanitizer")]
    assert sanitizers
    for graph in ("vision", *sanitizers):
        loaded = Model.of_bundle(opened, graph)
        without = inlined(loaded.onnx)
        assert graph != "vision" or without == loaded.onnx
        assert len(without) < 2 * len(loaded.onnx)
        found = onnx.load_from_string(without)
        assert {node.domain for node in found.graph.node} == {""}
        if graph != "vision":
            onnx.checker.check_model(found, full_check=True)
