"""Replaces calls of an ONNX file's functions by their bodies, for engine libraries without functions.

Uses protobuf alone: the package onnx is too large for a robot. A plan's graph grows by a few kilobytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

from sinkprune.runtime.backends.onnx_file import domain_of, message_class


def inlined(model: Any) -> bytes:
    """Return the file of a `Model` message from `read_onnx_file`, with the body of each function at its calls."""
    functions = {(domain_of(function), function.name, function.overload): function for function in model.functions}
    expanded = message_class("Model")()
    expanded.CopyFrom(model)
    del expanded.graph.node[:], expanded.functions[:]
    expanded.graph.node.extend(_expanded(model.graph.node, functions, "inlined"))
    return bytes(expanded.SerializeToString())


def _expanded(nodes: Any, functions: dict[Any, Any], prefix: str) -> Iterator[Any]:
    """Yield `nodes`, and for each call the nodes of its function, whose own values begin with `prefix`."""
    for number, node in enumerate(nodes):
        function = functions.get((domain_of(node), node.op_type, node.overload))
        if function is None:
            yield node
        else:
            yield from _expanded(_body(function, node, f"{prefix}.{number}"), functions, f"{prefix}.{number}")


def _body(function: Any, call: Any, prefix: str) -> Iterator[Any]:
    """Yield the nodes of `function` on the values of `call`."""
    # A missing input has no name anywhere. A missing output keeps its name, because other nodes may read it.
    inputs = dict(zip(function.input, chain(call.input, repeat("")), strict=False))
    outputs = {name: other for name, other in zip(function.output, call.output, strict=False) if other}
    names = {"": "", **inputs, **outputs}
    attributes = {attribute.name: attribute for attribute in (*function.attribute_proto, *call.attribute)}
    for node in function.node:
        own = message_class("Node")()
        own.CopyFrom(node)
        own.name = f"{prefix}.{node.name}"
        for values in (own.input, own.output):
            values[:] = [names.get(name, f"{prefix}.{name}") for name in values]
        del own.attribute[:]
        for attribute in node.attribute:
            if not attribute.ref_attr_name:
                own.attribute.append(attribute)
            elif attribute.ref_attr_name in attributes:
                own.attribute.append(attributes[attribute.ref_attr_name])
                own.attribute[-1].name = attribute.name
        yield own
