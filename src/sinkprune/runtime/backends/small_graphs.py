"""Small ONNX graphs: their writer, and those that backends on CUDA run besides a bundle's.

The writer needs protobuf alone: the package onnx is too large for a robot. The graphs have no weights, and the host
reads little and late through them. On CPUs the same is done in numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sinkprune.contract.manifest import Dtype, GraphSpec, Manifest, TensorSpec
from sinkprune.contract.precision import DTYPES, Array
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


BEST, NOT_FINITE, AT_TOKENS = "best", "not-finite", "at-tokens"
"""The names of the graphs, and of their engines."""


def best_graph(dtype: Dtype, vocabulary: int) -> GraphWriter:
    """Return a graph: best [1,2] fp32 of logits [1,vocabulary] of `dtype`.

    The first number is the index of the largest logit, the lowest of equal ones: `ArgMax` leaves ties to the library.
    The second is how many logits are not finite. fp32 holds every index below 2**24.
    """
    graph = GraphWriter()
    scores = graph.op("Cast", graph.input("logits", dtype, (1, vocabulary)), to=ELEMENT_TYPES["float32"])
    is_largest = graph.op("Equal", scores, graph.op("ReduceMax", scores, axes=[1]))
    place = graph.constant(np.arange(vocabulary, dtype=np.float32)[None])
    candidate = graph.op("Where", is_largest, place, graph.constant(np.array([[vocabulary]], np.float32)))
    index = graph.op("ReduceMin", candidate, axes=[1])
    graph.op("Concat", index, _not_finite(graph, scores, axis=1), into="best", axis=1)
    graph.output("best", "float32", (1, 2))
    return graph


def not_finite_graph(dtype: Dtype) -> GraphWriter:
    """Return a graph: count [1] fp32, how many of values [E] of `dtype` are not finite."""
    graph = GraphWriter()
    values = graph.op("Cast", graph.input("values", dtype, ("E",)), to=ELEMENT_TYPES["float32"])
    graph.op("Identity", _not_finite(graph, values, axis=0), into="count")
    graph.output("count", "float32", (1,))
    return graph


def at_tokens_graph(dtype: Dtype, width: int) -> GraphWriter:
    """Return a graph: the rows of two tables [P,width] at the tokens kept [G,n] + first [G,1], each [G,n,width]."""
    graph = GraphWriter()
    tables = [graph.input(name, dtype, ("P", width)) for name in ("cos", "sin")]
    kept, first = graph.input("kept", "int64", ("G", "n")), graph.input("first", "int64", ("G", 1))
    tokens = graph.op("Add", kept, first)
    for table in tables:
        graph.op("Gather", table, tokens, into=f"{table}_out", axis=0)
        graph.output(f"{table}_out", dtype, ("G", "n", width))
    return graph


WRITERS: Mapping[str, Callable[..., GraphWriter]] = {
    BEST: best_graph,
    NOT_FINITE: not_finite_graph,
    AT_TOKENS: at_tokens_graph,
}
"""The writers of the graphs, by name."""


def _not_finite(graph: GraphWriter, values: str, axis: int) -> str:
    # Comparisons with what is no number are false. A library may take x - x for 0.
    largest = graph.constant(np.array(np.finfo(np.float32).max))
    is_finite = graph.op("LessOrEqual", graph.op("Abs", values), largest)
    return graph.op(
        "ReduceSum",
        graph.op("Cast", graph.op("Not", is_finite), to=ELEMENT_TYPES["float32"]),
        graph.constant(np.array([axis])),
    )


def graphs_of(manifest: Manifest) -> dict[str, GraphWriter]:
    """Return the graphs that a bundle needs, by their names."""
    lm, precision = manifest.language_model, DTYPES[manifest.precision].name
    kinds: dict[str, tuple[Any, ...]] = {}
    if manifest.policy is None:
        kinds[BEST] = (precision, lm.vocab_size)
    if manifest.projector is None:
        kinds[NOT_FINITE] = (precision,)
    if lm.rope_sections:
        kinds[AT_TOKENS] = (precision, lm.head_dim // 2)
    return {name: WRITERS[name](*kind) for name, kind in kinds.items()}
