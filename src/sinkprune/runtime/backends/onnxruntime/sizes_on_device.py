"""What graphs need to be captured by ONNX Runtime."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from sinkprune.runtime.backends.models import message_class
from sinkprune.runtime.backends.small_graphs import add_constant

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
        add_constant(graph, name, np.array(value, np.int64))
    add_constant(graph, "sinkprune_last", np.array([-1], np.int64))
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
