"""Functions of an ONNX file put in the place of their calls, for engine libraries that know none.

With protobuf alone: onnx itself is not for a robot. A plan's graph grows by a few kilobytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

from sinkprune.runtime.backends.onnx_file import domain_of, message_class


def inlined(data: bytes) -> bytes:
    """The ONNX file `data`, which `read_onnx_file` has found to end, without functions: each call is its body."""
    model = message_class("Model").FromString(data)
    if not model.functions:
        return data
    functions = {(domain_of(function), function.name, function.overload): function for function in model.functions}
    nodes = list(_expanded(model.graph.node, functions, "inlined"))
    del model.graph.node[:], model.functions[:]
    model.graph.node.extend(nodes)
    return bytes(model.SerializeToString())


def _expanded(nodes: Any, functions: dict[Any, Any], prefix: str) -> Iterator[Any]:
    """`nodes`, and for calls the nodes of their functions, whose own values begin with `prefix`."""
    for number, node in enumerate(nodes):
        function = functions.get((domain_of(node), node.op_type, node.overload))
        if function is None:
            yield node
        else:
            yield from _expanded(_body(function, node, f"{prefix}.{number}"), functions, f"{prefix}.{number}")


def _body(function: Any, call: Any, prefix: str) -> Iterator[Any]:
    """The nodes of `function` on the values of `call`."""
    # An input that a call leaves out has no name anywhere; an output has one still, for the other nodes.
    given = dict(zip(function.input, chain(call.input, repeat("")), strict=False))
    made = {name: other for name, other in zip(function.output, call.output, strict=False) if other}
    names = {"": "", **given, **made}
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
