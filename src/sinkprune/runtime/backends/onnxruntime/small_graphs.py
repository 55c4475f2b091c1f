"""ONNX files of a few nodes, for work between a model's graphs.

Made with protobuf alone: the package onnx is too large for a robot.
"""

from __future__ import annotations

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


def add_value(values: Any, name: str, element_type: int, shape: tuple[int | str, ...]) -> None:
    """Add an input or output of a graph; sizes that are texts are names."""
    tensor = values.add(name=name).type.tensor_type
    tensor.elem_type = element_type
    for size in shape:
        tensor.shape.dim.add(**{"dim_value" if isinstance(size, int) else "dim_param": size})


def _add_constant(graph: Any, name: str, array: Array) -> None:
    element_type = ELEMENT_TYPES[array.dtype.name]
    graph.initializer.add(name=name, data_type=element_type, dims=array.shape, raw_data=array.tobytes())
