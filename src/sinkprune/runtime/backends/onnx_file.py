"""ONNX files, checked before a library loads them, and inlined for libraries without functions.

Uses protobuf alone: the package onnx is too large for a robot. The schema below is the part of onnx.proto3 that
matters here. Protobuf keeps fields that a schema does not name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import chain, repeat
from math import prod
from typing import Any, NamedTuple

import numpy as np

from sinkprune.contract.errors import BackendError

_SCHEMA = {
    "Model": {"graph": (7, "Graph"), "functions": (25, "Function*")},
    "Graph": {
        "node": (1, "Node*"),
        "initializer": (5, "Tensor*"),
        "sparse_initializer": (15, "SparseTensor*"),
    },
    "Function": {
        "name": (1, "text"),
        "input": (4, "text*"),
        "output": (5, "text*"),
        "node": (7, "Node*"),
        "domain": (10, "text"),
        "attribute_proto": (11, "Attribute*"),
        "overload": (13, "text"),
    },
    "Node": {
        "input": (1, "text*"),
        "output": (2, "text*"),
        "name": (3, "text"),
        "op_type": (4, "text"),
        "attribute": (5, "Attribute*"),
        "domain": (7, "text"),
        "overload": (8, "text"),
    },
    "Attribute": {
        "name": (1, "text"),
        "t": (5, "Tensor"),
        "g": (6, "Graph"),
        "tensors": (10, "Tensor*"),
        "graphs": (11, "Graph*"),
        "ref_attr_name": (21, "text"),
        "sparse_tensor": (22, "SparseTensor"),
        "sparse_tensors": (23, "SparseTensor*"),
    },
    "SparseTensor": {"values": (1, "Tensor"), "indices": (2, "Tensor")},
    "Tensor": {
        "dims": (1, "number*"),
        "data_type": (2, "number"),
        "name": (8, "text"),
        "external_data": (13, "Entry*"),
    },
    "Entry": {"key": (1, "text"), "value": (2, "text")},
}
"""Messages of onnx.proto3, with the number and type of each field; a star marks a repeated field."""
_DTYPES = {
    1: "float32",
    2: "uint8",
    3: "int8",
    7: "int64",
    9: "bool",
    10: "float16",
    16: "bfloat16",
    21: "uint4",
    22: "int4",
}
"""The types that sinkprune writes, by their numbers in onnx.proto3. ONNX Runtime packs codes into uint8."""
_MATRIX_BITS = {"bfloat16": 16, "uint4": 4, "int4": 4}
"""Bits of the types that numpy does not have. Only matrices have these types, and no matrix is read here."""
_MATRICES = {"MatMul": (1,), "FusedMatMul": (1,), "Gemm": (1,), "FusedGemm": (1,), "MatMulNBits": (1, 2, 3)}
"""By operator of ONNX or ONNX Runtime: the inputs that are a matrix, or its codes, scales and zero points."""
_PACKED = "prepacked"
"""How the keys begin under which ONNX Runtime stores a packed copy of a matrix."""
_MOST_NODES = 50_000
_MOST_AXES, _LONGEST_AXIS = 8, 1 << 40
_MOST_FUNCTIONS_DEEP = 32


class Weight(NamedTuple):
    """A tensor of a graph whose bytes lie in another file."""

    name: str
    location: str
    """The file, relative to the folder of the ONNX file."""
    offset: int
    """The first byte in that file."""
    shape: tuple[int, ...]
    dtype: str
    """The type of the values, by numpy's name."""
    multiplied: bool
    """Whether it is the matrix of a MatMul, or its codes or scales. Engine libraries repack those when they load."""
    packed: bool
    """Whether the file also holds it as ONNX Runtime packed it, to be mapped and used as it is."""

    @property
    def bytes(self) -> int:
        """The number of bytes."""
        bits = _MATRIX_BITS.get(self.dtype) or 8 * np.dtype(self.dtype).itemsize
        return (prod(self.shape) * bits + 7) // 8


class OnnxFile(NamedTuple):
    """An ONNX file, parsed and checked."""

    data: bytes
    message: Any
    """The `Model` message."""
    weights: tuple[Weight, ...]
    """The weights that lie in other files."""


def read_onnx_file(data: bytes, what: str) -> OnnxFile:
    """Parse an ONNX file, and reject what sinkprune never writes; `what` begins messages.

    Rejected are graphs within a node (Loop, If, Scan), because a loop need not end; functions that call themselves,
    or expand to more than 50,000 nodes; and values in other files that are no weights of the graph. Raises
    `BackendError`.
    """
    from google.protobuf.message import DecodeError

    try:
        model = message_class("Model").FromString(data)
    except DecodeError as error:
        raise BackendError(f"{what} is no ONNX model ({error}). Export or copy the bundle again.") from error
    if not model.HasField("graph"):
        raise BackendError(f"{what} is no ONNX model: it has no graph. Export or copy the bundle again.")
    _check_functions(model, what)
    for node in (*model.graph.node, *(node for function in model.functions for node in function.node)):
        _check_attributes(node.attribute, f"{what}: its node {node.op_type!r}")
    for function in model.functions:
        _check_attributes(function.attribute_proto, f"{what}: a function of it")
    _check_inside(_parts(model.graph.sparse_initializer), f"{what}: a sparse tensor of it")
    matrices = _matrices(model.graph)
    external = [tensor for tensor in model.graph.initializer if tensor.external_data]
    if len({tensor.name for tensor in external}) != len(external):
        raise BackendError(f"{what} has two weights of one name. Export or copy the bundle again.")
    return OnnxFile(data, model, tuple(_weight(tensor, tensor.name in matrices, what) for tensor in external))


def _matrices(graph: Any) -> set[str]:
    """Return the names of all values that a product uses as its matrix, and of those they are dequantised from."""
    sources = {
        node.output[0]: node.input
        for node in graph.node
        if node.op_type in ("DequantizeLinear", "Cast") and len(node.output) == 1
    }
    found: set[str] = set()
    left = [
        node.input[place]
        for node in graph.node
        for place in _MATRICES.get(node.op_type, ())
        if place < len(node.input)
    ]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += sources.get(name, ())
    return found


def _weight(tensor: Any, multiplied: bool, what: str) -> Weight:
    entries = [(entry.key, entry.value) for entry in tensor.external_data]
    place = dict(entries)
    offset, shape = place.get("offset", "0"), tuple(tensor.dims)
    fits = (
        len(place) == len(entries)
        # For ONNX Runtime, a location with a star is an address in memory.
        and "*" not in place.get("location", "*")
        and re.fullmatch("[0-9]{1,18}", offset)
        and (dtype := _DTYPES.get(tensor.data_type)) is not None
        and (multiplied or dtype not in _MATRIX_BITS)
        and len(shape) <= _MOST_AXES
        and all(0 <= size <= _LONGEST_AXIS for size in shape)
    )
    if not fits:
        raise BackendError(
            f"{what}: its weight {tensor.name!r} of type {tensor.data_type} and shape {list(shape)} lies at {place}, "
            "which sinkprune never writes. Export the bundle again."
        )
    packed = any(key.startswith(_PACKED) for key in place)
    return Weight(tensor.name, place["location"], int(offset), shape, str(dtype), multiplied, packed)


def _check_functions(model: Any, what: str) -> None:
    """Reject functions that would expand to a graph that is endless or too large."""
    bodies = {(domain_of(function), function.name, function.overload): function.node for function in model.functions}
    counted: dict[Any, tuple[int, int]] = {}

    def count(nodes: Any, depth: int) -> tuple[int, int]:
        """Return the expanded number of `nodes`, and how deep they call functions; they stand `depth` calls deep."""
        total, deepest = len(nodes), 0
        for node in nodes:
            called = (domain_of(node), node.op_type, node.overload)
            if called not in bodies:
                continue
            if called not in counted and depth < _MOST_FUNCTIONS_DEEP:
                counted[called] = count(bodies[called], depth + 1)
            inner, below = counted.get(called, (0, _MOST_FUNCTIONS_DEEP))
            total, deepest = total + inner, max(deepest, 1 + below)
        if depth + deepest > _MOST_FUNCTIONS_DEEP:
            raise BackendError(
                f"{what} has functions that call each other more than {_MOST_FUNCTIONS_DEEP} deep, or themselves. "
                "sinkprune writes no such bundle: export it again."
            )
        return total, deepest

    nodes, _ = count(model.graph.node, 0)
    if nodes > _MOST_NODES:
        raise BackendError(
            f"{what} has {nodes} nodes, those of its functions counted at every call, expected at most "
            f"{_MOST_NODES}. sinkprune writes no such bundle: export it again."
        )


def domain_of(named: Any) -> str:
    """Return the domain of a node or a function; ONNX's own domain has two names."""
    return "" if named.domain == "ai.onnx" else str(named.domain)


def _check_attributes(attributes: Any, what: str) -> None:
    for attribute in attributes:
        if attribute.HasField("g") or attribute.graphs:
            raise BackendError(
                f"{what} holds a graph, which may run without end. sinkprune writes no such bundle: export it again."
            )
        sparse = _parts([attribute.sparse_tensor, *attribute.sparse_tensors])
        _check_inside([attribute.t, *attribute.tensors, *sparse], what)


def _check_inside(tensors: Any, what: str) -> None:
    if any(tensor.external_data for tensor in tensors):
        raise BackendError(f"{what} reads its value from a file. sinkprune writes no such bundle: export it again.")


def _parts(sparse: Any) -> Iterator[Any]:
    for tensor in sparse:
        yield tensor.values
        yield tensor.indices


def message_class(name: str) -> Any:
    """Return the class of the schema's message `name`."""
    from google.protobuf import message_factory

    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"sinkprune.{name}"))


@cache
def _pool() -> Any:
    """Return the schema in a pool of its own."""
    from google.protobuf import descriptor_pb2, descriptor_pool

    field = descriptor_pb2.FieldDescriptorProto
    types = {"text": field.TYPE_STRING, "number": field.TYPE_INT64}
    # The package is not named "onnx", because the library onnx registers messages of these names.
    file = descriptor_pb2.FileDescriptorProto(name="sinkprune_onnx.proto", package="sinkprune", syntax="proto3")
    for message, fields in _SCHEMA.items():
        described = file.message_type.add(name=message)
        for label, (number, kind) in fields.items():
            many, kind = kind.endswith("*"), kind.removesuffix("*")
            added = described.field.add(name=label, number=number)
            added.label = field.LABEL_REPEATED if many else field.LABEL_OPTIONAL
            added.type = types.get(kind, field.TYPE_MESSAGE)
            if kind not in types:
                added.type_name = f".sinkprune.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


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
