"""Writes small ONNX graphs, with protobuf alone: the package onnx is too large for a robot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sinkprune.contract.manifest import Dtype, GraphSpec, TensorSpec
from sinkprune.contract.precision import Array
from sinkprune.runtime.backends.models import message_class

ELEMENT_TYPES = {"float32": 1, "uint8": 2, "int32": 6, "int64": 7, "bool": 9, "float16": 10, "float64": 11}
"""The types of tensors, by their numbers in onnx.proto3."""
_INT, _TENSOR, _INTS = 2, 4, 7
"""The types of attributes, likewise."""
_IR_VERSION, _OPSET = 8, 13


class GraphWriter:
    """A graph of opset 13 under construction. Values are their names."""

    def __init__(self) -> None:
        self._model = message_class("Model")(ir_version=_IR_VERSION)
        self._model.opset_import.add(version=_OPSET)
        self._graph = self._model.graph
        self._graph.name = "graph"
        self._inputs, self._outputs = list[TensorSpec](), list[TensorSpec]()

    def input(self, name: str, dtype: Dtype, shape: Sequence[int | str]) -> str:
        """Declare an input; a size that is a text may differ from call to call."""
        self._inputs.append(TensorSpec(name, dtype, tuple(shape)))
        add_value(self._graph.input, name, ELEMENT_TYPES[dtype], shape)
        return name

    def output(self, name: str, dtype: Dtype, shape: Sequence[int | str]) -> None:
        """Declare the value `name` an output."""
        self._outputs.append(TensorSpec(name, dtype, tuple(shape)))
        add_value(self._graph.output, name, ELEMENT_TYPES[dtype], shape)

    def constant(self, array: Array) -> str:
        """Return a constant."""
        name = f"constant_{len(self._graph.initializer)}"
        add_constant(self._graph, name, array)
        return name

    def op(self, operator: str, *inputs: str, into: str = "", **attributes: int | Sequence[int] | Array) -> str:
        """Add a node with one output, which is named `into`, and return its name."""
        output = into or f"value_{len(self._graph.node)}"
        node = self._graph.node.add(op_type=operator, input=inputs, output=[output], name=output)
        for name, value in attributes.items():
            added = node.attribute.add(name=name)
            if isinstance(value, np.ndarray):
                added.type = _TENSOR
                added.t.CopyFrom(_tensor("", value))
            elif isinstance(value, int):
                added.type, added.i = _INT, value
            else:
                added.type = _INTS
                added.ints.extend(value)
        return output

    def split(self, value: str, count: int, axis: int) -> list[str]:
        """Return `count` equal parts of `value`."""
        first = self.op("Split", value, axis=axis)
        outputs = [first, *(f"{first}_{number}" for number in range(1, count))]
        self._graph.node[-1].output.extend(outputs[1:])
        return outputs

    def model(self) -> bytes:
        """Return the ONNX file."""
        return bytes(self._model.SerializeToString())

    def spec(self, file: str) -> GraphSpec:
        """Return the inputs and outputs, as those of the graph in `file`."""
        return GraphSpec(file, (*self._inputs,), (*self._outputs,))


def add_value(values: Any, name: str, element_type: int, shape: Sequence[int | str]) -> None:
    """Add an input or output of a graph; sizes that are texts are names."""
    tensor = values.add(name=name).type.tensor_type
    tensor.elem_type = element_type
    for size in shape:
        tensor.shape.dim.add(**{"dim_value" if isinstance(size, int) else "dim_param": size})


def add_constant(graph: Any, name: str, array: Array) -> None:
    """Add a constant to a graph."""
    graph.initializer.append(_tensor(name, array))


def _tensor(name: str, array: Array) -> Any:
    kind = ELEMENT_TYPES[array.dtype.name]
    return message_class("Tensor")(name=name, data_type=kind, dims=array.shape, raw_data=array.tobytes())
