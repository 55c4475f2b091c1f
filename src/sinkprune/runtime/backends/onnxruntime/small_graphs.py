"""ONNX files of a few nodes, for work between a model's graphs, and what graphs need to be captured.

Made with protobuf alone: the package onnx is too large for a robot.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from sinkprune.contract.precision import Array
from sinkprune.runtime.backends.models import message_class

_FLOAT, _INTS, _INT = 1, 7, 2
"""Numbers of onnx.proto3: the type of fp32, and of attributes with several integers or one."""
ELEMENT_TYPES = {"float32": 1, "int32": 6, "int64": 7, "bool": 9, "float16": 10}
"""The types of tensors, by their numbers in onnx.proto3."""


def best_graph(dtype: str, vocabulary: int) -> bytes:
    """Return an ONNX file: best [1,2] fp32 of logits [1,vocabulary] of `dtype`.

    The first number is the index of the largest logit, the lowest of equal ones: `ArgMax` leaves ties to the library.
    The second is 0 if all logits are finite, and not a number otherwise. fp32 holds every index below 2**24.
    """
    model = message_class("Model")(ir_version=8)
    model.opset_import.add(version=12)
    model.graph.name = "best"
    add_value(model.graph.input, "logits", ELEMENT_TYPES[dtype], (1, vocabulary))
    add_value(model.graph.output, "best", _FLOAT, (1, 2))
    _add_constant(model.graph, "place", np.arange(vocabulary, dtype=np.float32)[None])
    _add_constant(model.graph, "none", np.float32(vocabulary).reshape(1))
    for operator, inputs, output, attributes in (
        ("Cast", ["logits"], "scores", {"to": _FLOAT}),
        ("ReduceMax", ["scores"], "largest", {"axes": [1]}),
        ("Equal", ["scores", "largest"], "is_largest", {}),
        ("Where", ["is_largest", "place", "none"], "candidate", {}),
        ("ReduceMin", ["candidate"], "index", {"axes": [1]}),
        # 0 for a finite number, else not a number.
        ("Sub", ["scores", "scores"], "nothing", {}),
        ("ReduceSum", ["nothing"], "finite", {"axes": [1]}),
        ("Concat", ["index", "finite"], "best", {"axis": 1}),
    ):
        node = model.graph.node.add(op_type=operator, input=inputs, output=[output], name=output)
        for name, value in attributes.items():
            if isinstance(value, list):
                node.attribute.add(name=name, type=_INTS, ints=value)
            else:
                node.attribute.add(name=name, type=_INT, i=value)
    return bytes(model.SerializeToString())


_FLOATS = {1, 10, 16}
_ELEMENTWISE = {"Add", "And", "Div", "Equal", "Greater", "Less", "LessOrEqual", "Max", "Min", "Mul", "Sub", "Where"}


def sizes_of_graph(graph: Any) -> set[str]:
    """Return the values that follow from constants and shapes alone: ONNX Runtime computes them on the processor."""
    found = {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type in ("Shape", "Size") or found.issuperset(name for name in node.input if name):
            found.update(node.output)
    return found


def with_sizes_on_device(onnx: bytes) -> bytes | None:
    """Return an ONNX file in which no single size is copied to the GPU, which a capture forbids; None for the same.

    `Range` takes a size on the processor and gives numbers on the GPU. The last of its numbers up to a size is that
    size.
    """
    model = message_class("Model").FromString(onnx)
    graph = model.graph
    single = {tensor.name for tensor in graph.initializer if prod(tensor.dims) == 1}
    sizes, nodes, moved = set[str](), list[Any](), set[str]()
    for node in graph.node:
        given = [name for name in node.input if name in sizes]
        values = {attribute.name: attribute.i for attribute in node.attribute}
        to_float = node.op_type == "Cast" and values["to"] in _FLOATS
        if (
            node.op_type == "Size"
            or (node.op_type == "Shape" and values.get("end", 0) - values.get("start", 0) == 1)
            or (
                given
                and node.op_type in _ELEMENTWISE | {"Squeeze", "Unsqueeze"}
                and single.union(sizes).issuperset(node.input)
            )
        ):
            sizes.update(node.output)
        elif given and (node.op_type in _ELEMENTWISE or to_float):
            for name in given:
                if name not in moved:
                    nodes += _moved(name)
                    moved.add(name)
            # All names at once: protobuf replaces no part of a repeated field.
            node.input[:] = [_ON_DEVICE.format(name, 0) if name in given else name for name in node.input]
        nodes.append(node)
    if not moved:
        return None
    for name, value in (("sinkprune_0", 0), ("sinkprune_1", 1)):
        _add_constant(graph, name, np.array(value, np.int64))
    _add_constant(graph, "sinkprune_last", np.array([-1], np.int64))
    copied = [type(node).FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copied)
    return bytes(model.SerializeToString())


_ON_DEVICE = "{}_on_device_{}"


def _moved(name: str) -> list[Any]:
    """Return the nodes that give a size on the GPU, a number alone or in a list as it is on the processor."""
    shape, last, after, end, every, size = (_ON_DEVICE.format(name, number) for number in (5, 4, 3, 2, 1, 0))
    node = message_class("Node")
    return [
        node(op_type="Add", input=[name, "sinkprune_1"], output=[after], name=after),
        node(op_type="Squeeze", input=[after], output=[end], name=end),
        node(op_type="Range", input=["sinkprune_0", end, "sinkprune_1"], output=[every], name=every),
        node(op_type="Gather", input=[every, "sinkprune_last"], output=[last], name=last),
        node(op_type="Shape", input=[name], output=[shape], name=shape),
        node(op_type="Reshape", input=[last, shape], output=[size], name=size),
    ]


def add_value(values: Any, name: str, element_type: int, shape: tuple[int | str, ...]) -> None:
    """Add an input or output of a graph; sizes that are texts are names."""
    tensor = values.add(name=name).type.tensor_type
    tensor.elem_type = element_type
    for size in shape:
        tensor.shape.dim.add(**{"dim_value" if isinstance(size, int) else "dim_param": size})


def _add_constant(graph: Any, name: str, array: Array) -> None:
    element_type = ELEMENT_TYPES[array.dtype.name]
    graph.initializer.add(name=name, data_type=element_type, dims=array.shape, raw_data=array.tobytes())
