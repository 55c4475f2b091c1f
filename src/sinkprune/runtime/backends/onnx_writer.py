"""Writes small ONNX graphs.

The few fields of their files are encoded here: the package onnx is too large for a robot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sinkprune.contract.manifest import Dtype, GraphSpec, TensorSpec
from sinkprune.contract.precision import Array

ELEMENT_TYPES = {"float32": 1, "uint8": 2, "int32": 6, "int64": 7, "float16": 10, "float64": 11}
"""The numbers of onnx.proto3, by numpy's names."""
_IR_VERSION, _OPSET = 8, 13


class GraphWriter:
    """A graph of opset 13 under construction. Values are their names."""

    def __init__(self) -> None:
        self._nodes = list[bytes]()
        self._initializers = list[bytes]()
        self._inputs, self._outputs = list[TensorSpec](), list[TensorSpec]()

    def input(self, name: str, dtype: Dtype, shape: Sequence[int | str]) -> str:
        """Declare an input; a size that is a text may differ from call to call."""
        self._inputs.append(TensorSpec(name, dtype, tuple(shape)))
        return name

    def output(self, name: str, dtype: Dtype, shape: Sequence[int | str]) -> None:
        """Declare the value `name` an output."""
        self._outputs.append(TensorSpec(name, dtype, tuple(shape)))

    def constant(self, array: Array) -> str:
        """Return a constant."""
        name = f"constant_{len(self._initializers)}"
        self._initializers.append(_tensor(array, name))
        return name

    def op(self, operator: str, *inputs: str, into: str = "", **attributes: Any) -> str:
        """Add a node with one output, which is named `into`, and return its name."""
        return self._node(operator, inputs, [into or f"value_{len(self._nodes)}"], attributes)[0]

    def split(self, value: str, count: int, axis: int) -> list[str]:
        """Return `count` equal parts of `value`."""
        outputs = [f"part_{len(self._nodes)}_{number}" for number in range(count)]
        return self._node("Split", [value], outputs, {"axis": axis})

    def _node(
        self, operator: str, inputs: Sequence[str], outputs: list[str], attributes: Mapping[str, Any]
    ) -> list[str]:
        parts = [_field(number, name.encode()) for number, names in ((1, inputs), (2, outputs)) for name in names]
        parts += [_field(5, _attribute(name, value)) for name, value in attributes.items()]
        self._nodes.append(b"".join([*parts, _field(4, operator.encode())]))
        return outputs

    def model(self) -> bytes:
        """Return the ONNX file."""
        inputs, outputs = ([*map(_value, specs)] for specs in (self._inputs, self._outputs))
        parts = ((1, self._nodes), (5, self._initializers), (11, inputs), (12, outputs))
        graph = _field(2, b"graph") + b"".join(_field(number, one) for number, every in parts for one in every)
        return _number(1, _IR_VERSION) + _field(7, graph) + _field(8, _field(1, b"") + _number(2, _OPSET))

    def spec(self, file: str) -> GraphSpec:
        """Return the inputs and outputs, as those of the graph in `file`."""
        return GraphSpec(file, (*self._inputs,), (*self._outputs,))


def _attribute(name: str, value: int | Sequence[int] | Array) -> bytes:
    """Return an attribute: a whole number, several, or a tensor, by its type in onnx.proto3."""
    own = _field(1, name.encode())
    if isinstance(value, np.ndarray):
        return own + _number(20, 4) + _field(5, _tensor(value))
    if isinstance(value, int):
        return own + _number(20, 2) + _number(3, value)
    return own + _number(20, 7) + b"".join(_number(8, one) for one in value)


def _tensor(array: Array, name: str = "") -> bytes:
    sizes = b"".join(_number(1, size) for size in array.shape)
    kind = _number(2, ELEMENT_TYPES[array.dtype.name])
    return sizes + kind + _field(8, name.encode()) + _field(9, array.tobytes())


def _value(spec: TensorSpec) -> bytes:
    sizes = b"".join(
        _field(1, _number(1, size) if isinstance(size, int) else _field(2, size.encode())) for size in spec.shape
    )
    kind = _number(1, ELEMENT_TYPES[spec.dtype]) + _field(2, sizes)
    return _field(1, spec.name.encode()) + _field(2, _field(1, kind))


def _field(number: int, content: bytes) -> bytes:
    """Return a protobuf field of bytes: its number and kind, the length, and the bytes."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value % 2**64)


def _varint(value: int) -> bytes:
    groups = bytearray()
    while value > 127:
        groups.append(value & 127 | 128)
        value >>= 7
    return bytes([*groups, value])
