"""ONNX files of the graphs that fill KV caches and copy tensors on a GPU.

ONNX Runtime's Python copies whole tensors only, and from or to the host. The few fields of these files are encoded
here, because the package onnx is too large for a robot.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_INT64 = 7
_ELEMENT_TYPES = {"float32": 1, "float16": 10}
"""The numbers of onnx.proto3."""

Kind = tuple[int, int]
"""A tensor's element type, by the numbers of onnx.proto3, and how many dimensions it has."""


def zeros_graph(dtype: str) -> bytes:
    """Return an ONNX file: zeros = ConstantOfShape(shape), of `dtype` "float32" or "float16" and four dimensions."""
    kind = _ELEMENT_TYPES[dtype]
    zero = _number(1, 1) + _number(2, kind) + _field(9, bytes(np.dtype(dtype).itemsize))
    value = _field(1, b"value") + _number(20, 4) + _field(5, zero)
    node = _node("ConstantOfShape", ["shape"], "zeros") + _field(5, value)
    return _model([node], [_value("shape", _INT64, 1)], [_value("zeros", kind, 4)])


def scatter_graph(dtype: str) -> bytes:
    """Return an ONNX file: written = ScatterND(target, indices, Gather(source, rows, axis=2)).

    `target`, `source` and `written` have `dtype` and are [1,H,R,h]. `rows` [N] chooses rows of `source`; `indices`
    [1,H,N,3] are their places in `target`. Both are int64.
    """
    kind = _ELEMENT_TYPES[dtype]
    axis = _field(1, b"axis") + _number(20, 2) + _number(3, 2)
    gather = _node("Gather", ["source", "rows"], "taken") + _field(5, axis)
    scatter = _node("ScatterND", ["target", "indices", "taken"], "written")
    inputs = [_value("target", kind, 4), _value("indices", _INT64, 4), _value("source", kind, 4)]
    return _model([gather, scatter], [*inputs, _value("rows", _INT64, 1)], [_value("written", kind, 4)])


def copies_graph(kinds: Sequence[Kind]) -> bytes:
    """Return an ONNX file: copy_0 = source_0, copy_1 = source_1 and so on, of the given kinds."""
    nodes = [_node("Identity", [f"source_{number}"], f"copy_{number}") for number in range(len(kinds))]
    sources, copies = (
        [_value(f"{name}_{number}", *kind) for number, kind in enumerate(kinds)] for name in ("source", "copy")
    )
    return _model(nodes, sources, copies)


def _model(nodes: list[bytes], inputs: list[bytes], outputs: list[bytes]) -> bytes:
    """Return an ONNX file of format 8 and operator set 13."""
    graph = b"".join(_field(1, node) for node in nodes) + _field(2, b"rows")
    graph += b"".join(_field(11, value) for value in inputs) + b"".join(_field(12, value) for value in outputs)
    return _number(1, 8) + _field(7, graph) + _field(8, _field(1, b"") + _number(2, 13))


def _node(operator: str, inputs: list[str], output: str) -> bytes:
    names = b"".join(_field(1, name.encode()) for name in inputs)
    return names + _field(2, output.encode()) + _field(4, operator.encode())


def _value(name: str, element_type: int, dimensions: int) -> bytes:
    any_shape = _field(2, _field(1, b"") * dimensions)
    return _field(1, name.encode()) + _field(2, _field(1, _number(1, element_type) + any_shape))


def _field(number: int, content: bytes) -> bytes:
    """Return a protobuf field of bytes: its number, the length in groups of 7 bits, and the bytes."""
    length, groups = len(content), []
    while length > 127:
        groups.append(length & 127 | 128)
        length >>= 7
    return bytes([*_key(number, 2), *groups, length]) + content


def _number(number: int, value: int) -> bytes:
    """Return a protobuf field with a number below 128."""
    return bytes([*_key(number, 0), value])


def _key(number: int, wire_type: int) -> bytes:
    """Return the first bytes of a protobuf field: its number, below 2048, and the type of what follows."""
    key = number << 3 | wire_type
    return bytes([key]) if key < 128 else bytes([key & 127 | 128, key >> 7])
