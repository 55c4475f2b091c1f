"""What an ONNX file may do when it is loaded and run, read with protobuf alone: onnx itself is not for a robot.

Protobuf passes over fields that a schema does not name, so the part of onnx.proto3 that matters here is enough of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from math import prod
from typing import Any, NamedTuple

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
"""Messages of onnx.proto3 with the numbers and types of their fields; a star stands for any number of them."""
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
"""By their numbers in onnx.proto3, the types that sinkprune writes; uint8 is what ONNX Runtime packs codes into."""
_BITS = {
    "float32": 32,
    "uint8": 8,
    "int8": 8,
    "int64": 64,
    "bool": 8,
    "float16": 16,
    "bfloat16": 16,
    "uint4": 4,
    "int4": 4,
}
_OF_MATRICES = ("bfloat16", "uint4", "int4")
"""Types that numpy does not know: only matrices are of them, which are never read here."""
_MATRICES = {"MatMul": (1,), "FusedMatMul": (1,), "Gemm": (1,), "FusedGemm": (1,), "MatMulNBits": (1, 2, 3)}
"""The inputs that are matrices, or their codes, scales and zero points: of ONNX's operators and ONNX Runtime's."""
_PACKED = "prepacked"
"""How ONNX Runtime names the place of a matrix as it packed it, beside the matrix itself."""
_MOST_NODES = 50_000
_MOST_AXES, _LONGEST_AXIS = 8, 1 << 40
_MOST_FUNCTIONS_DEEP = 32


class Weight(NamedTuple):
    """A tensor of a graph whose bytes lie in another file."""

    name: str
    location: str
    """The file, as the ONNX file names it: relative to its own folder."""
    offset: int
    """Where its bytes begin, counted in bytes."""
    shape: tuple[int, ...]
    dtype: str
    """The type of its values, in numpy's words."""
    multiplied: bool
    """Whether it is the matrix of a MatMul, or its codes or scales: engine libraries pack those anew when they load
    them."""
    packed: bool
    """Whether it also lies there as ONNX Runtime packed it, to be mapped and computed with as it is."""

    @property
    def bytes(self) -> int:
        """How many bytes it has."""
        return (prod(self.shape) * _BITS[self.dtype] + 7) // 8


def read_onnx_file(data: bytes, what: str) -> list[Weight]:
    """The weights of an ONNX file that lie in other files; `what` begins messages.

    Refused is what sinkprune never writes: a graph within a node (Loop, If, Scan), for a loop need not end; functions
    that call themselves, or come to more than 50,000 nodes; and values in files that are no weights of the graph.
    Raises `BackendError`.
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
    return [_weight(tensor, tensor.name in matrices, what) for tensor in external]


def _matrices(graph: Any) -> set[str]:
    """The names of all values that are matrices of a product, and of what such a one is dequantised or cast from."""
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
    told = dict(entries)
    offset, shape = told.get("offset", "0"), tuple(tensor.dims)
    fits = (
        len(told) == len(entries)
        # ONNX Runtime means something else by a star than a file.
        and "*" not in told.get("location", "*")
        and re.fullmatch("[0-9]{1,18}", offset)
        and (dtype := _DTYPES.get(tensor.data_type)) is not None
        and (multiplied or dtype not in _OF_MATRICES)
        and len(shape) <= _MOST_AXES
        and all(0 <= size <= _LONGEST_AXIS for size in shape)
    )
    if not fits:
        raise BackendError(
            f"{what}: its weight {tensor.name!r} of type {tensor.data_type} and shape {list(shape)} lies at {told}, "
            "which sinkprune never writes. Export the bundle again."
        )
    packed = any(key.startswith(_PACKED) for key in told)
    return Weight(tensor.name, told["location"], int(offset), shape, str(dtype), multiplied, packed)


def _check_functions(model: Any, what: str) -> None:
    """Refuse functions whose bodies, each put in the place of its call, would make a graph without end or measure."""
    bodies = {(domain_of(function), function.name, function.overload): function.node for function in model.functions}
    counted: dict[Any, tuple[int, int]] = {}

    def count(nodes: Any, depth: int) -> tuple[int, int]:
        """How many nodes there are, and how deep functions call each other in them; `depth` deep it stands itself."""
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
    """The domain of a node or a function; ONNX's own has two names."""
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
    """The class of the message `name` of the schema; fields that the schema does not name stay when it is written."""
    from google.protobuf import message_factory

    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"sinkprune.{name}"))


@cache
def _pool() -> Any:
    """The schema, as protobuf knows it."""
    from google.protobuf import descriptor_pb2, descriptor_pool

    field = descriptor_pb2.FieldDescriptorProto
    types = {"text": field.TYPE_STRING, "number": field.TYPE_INT64}
    # Not "onnx": onnx, where it is imported too, has messages of these names.
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
