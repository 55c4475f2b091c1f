"""Small ONNX graphs: their writer, and those that backends on CUDA run besides a bundle's.

The writer needs protobuf alone: the package onnx is too large for a robot. The graphs have no weights, and the host
reads little and late through them. On CPUs the same is done in numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sinkprune.contract.budgets import MERGING_TOWER
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


BEST, NOT_FINITE, AT_TOKENS, PLACES_OF = "best", "not-finite", "at-tokens", "places-of"
IN_PARTS, IN_ORDER = "in-parts", "in-order"
"""The names of the graphs, and of their engines."""
LINE = 128
"""The rows that `in_parts_graph` counts together."""


def best_graph(dtype: Dtype, vocabulary: int) -> GraphWriter:
    """Return a graph: best [1,2] fp32 of logits [1,vocabulary] of `dtype`.

    The first number is the index of the largest logit, the lowest of equal ones: `ArgMax` leaves ties to the library.
    The second is how many logits are not finite. fp32 holds every index below 2**24.
    """
    graph = GraphWriter()
    scores = _as_floats(graph, graph.input("logits", dtype, (1, vocabulary)))
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
    values = _as_floats(graph, graph.input("values", dtype, ("E",)))
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


def places_of_graph(places: int) -> GraphWriter:
    """Return a graph: places [G,n] int64 of the tokens `kept` [G,n], from `merged` [G,places] of a tower's grid.

    A token's place is the one of its number among those that `merged` gives for themselves.
    """
    graph, place = GraphWriter(), np.arange(places)
    merged, kept = graph.input("merged", "int64", ("G", places)), graph.input("kept", "int64", ("G", "n"))
    stays = _as_floats(graph, graph.op("Equal", merged, graph.constant(place)))
    # [G,places,1]: how many tokens stand up to each place.
    counted = graph.constant((place <= place[:, None]).astype(np.float32))
    tokens = graph.op("MatMul", counted, graph.op("Unsqueeze", stays, graph.constant(np.array([2]))))
    number = graph.op("Unsqueeze", _as_floats(graph, kept), graph.constant(np.array([1])))
    earlier = _as_floats(graph, graph.op("Not", graph.op("Greater", tokens, number)))
    _whole(graph, graph.op("ReduceSum", earlier, graph.constant(np.array([1])), keepdims=0), into="places")
    graph.output("places", "int64", ("G", "n"))
    return graph


def in_order_graph(dtype: Dtype) -> GraphWriter:
    """Return a graph: the rows [1,S,D] whose numbers are order [1,S], of rows [1,S,D] of `dtype`."""
    graph = GraphWriter()
    rows = graph.op("Squeeze", graph.input("rows", dtype, (1, "S", "D")), graph.constant(np.array([0])))
    graph.op("Gather", rows, graph.input("order", "int64", (1, "S")), into="rows_out", axis=0)
    graph.output("rows_out", dtype, (1, "S", "D"))
    return graph


def in_parts_graph() -> GraphWriter:
    """Return a graph that moves the rows of a picture to its parts, between which there are texts.

    It takes the tokens kept [1,n], the order [1,S] of a prompt's rows and its visual rows [V], both with all rows of
    the picture before the texts, and gives both with each row in the part of its token, after earlier rows of this
    part. `first` and `end` [p,1,1] are the tokens of each part, `texts_before` [p,1,1] fp32 the rows of texts between
    parts before it. `text_part` [1,T] is the part after each of these rows. `first_row` [1] is where the picture
    begins, and `first_visual` [1] the same among visual rows.

    Sizes come as inputs, because graphs that compute with sizes are not captured: `count` [1] is n, `number` [n] and
    `text_number` [1,T] count from 0, `lines` [l,LINE] number the rows of n, and then n, and `earlier_lines` [l,l]
    fp32 is 1 above its diagonal. Rows are counted line by line: `CumSum` is a loop in TensorRT 10.3, and a table of
    all pairs would take a gigabyte for a long clip. Counts are exact in fp32 and TF32: factors of products are 0, 1
    or at most `LINE`.
    """
    graph = GraphWriter()
    flat, first_axis = graph.constant(np.array([-1])), graph.constant(np.array([0]))
    no_part = graph.constant(np.array([[np.iinfo(np.int32).max]], np.int64))
    kept = graph.op("Reshape", graph.op("Concat", graph.input("kept", "int64", (1, "n")), no_part, axis=1), flat)
    kept = graph.op("Gather", kept, graph.input("lines", "int64", ("l", LINE)), axis=0)
    # [p,l,LINE]: whether the token of a row is in an earlier part, or in this one.
    earlier, ended = (
        _as_floats(graph, graph.op("Less", kept, graph.input(name, "int64", ("p", 1, 1))))
        for name in ("first", "end")
    )
    inside = graph.op("Sub", ended, earlier)
    before = graph.op("ReduceSum", earlier, graph.constant(np.array([1, 2])))
    of_lines = graph.op("ReduceSum", inside, graph.constant(np.array([2])), keepdims=0)
    in_lines = graph.op("MatMul", of_lines, graph.input("earlier_lines", "float32", ("l", "l")))
    in_lines = graph.op("Unsqueeze", in_lines, graph.constant(np.array([2])))
    upto = graph.op("MatMul", inside, graph.constant(np.triu(np.ones((LINE, LINE), np.float32))))
    upto = graph.op("Add", graph.op("Add", upto, in_lines), before)
    number = graph.input("number", "int64", ("n",))

    def of_rows(values: str) -> str:
        own = graph.op("ReduceSum", graph.op("Mul", inside, values), first_axis, keepdims=0)
        return graph.op("Gather", _whole(graph, graph.op("Reshape", own, flat)), number, axis=0)

    place = graph.op("Sub", of_rows(upto), graph.constant(np.array([1])))
    row = graph.op("Add", place, of_rows(graph.input("texts_before", "float32", ("p", 1, 1))))
    before = _whole(graph, graph.op("Reshape", before, flat))
    text, part = (graph.input(name, "int64", (1, "T")) for name in ("text_number", "text_part"))
    text_row = graph.op("Add", text, graph.op("Gather", before, part, axis=0))
    start, count = (graph.input(name, "int64", (1,)) for name in ("first_row", "count"))
    moved, laid_out = (
        graph.op("Add", graph.op("Concat", graph.op("Unsqueeze", own, first_axis), others, axis=1), start)
        for own, others in ((row, text_row), (number, graph.op("Add", text, count)))
    )
    order = graph.input("order", "int64", (1, "S"))
    graph.op("ScatterElements", order, moved, laid_out, into="order_out", axis=1)
    graph.output("order_out", "int64", (1, "S"))
    visual = graph.input("visual", "int64", ("V",))
    place = graph.op("Add", place, graph.input("first_visual", "int64", (1,)))
    graph.op("ScatterElements", visual, place, graph.op("Add", row, start), into="visual_out", axis=0)
    graph.output("visual_out", "int64", ("V",))
    return graph


def _as_floats(graph: GraphWriter, values: str) -> str:
    return graph.op("Cast", values, to=ELEMENT_TYPES["float32"])


def _whole(graph: GraphWriter, values: str, into: str = "") -> str:
    return graph.op("Cast", values, to=ELEMENT_TYPES["int64"], into=into)


WRITERS: Mapping[str, Callable[..., GraphWriter]] = {
    BEST: best_graph,
    NOT_FINITE: not_finite_graph,
    AT_TOKENS: at_tokens_graph,
    PLACES_OF: places_of_graph,
    IN_PARTS: in_parts_graph,
    IN_ORDER: in_order_graph,
}
"""The writers of the graphs, by name."""


def _not_finite(graph: GraphWriter, values: str, axis: int) -> str:
    # Comparisons with what is no number are false. A library may take x - x for 0.
    largest = graph.constant(np.array(np.finfo(np.float32).max))
    is_finite = graph.op("LessOrEqual", graph.op("Abs", values), largest)
    return graph.op(
        "ReduceSum",
        _as_floats(graph, graph.op("Not", is_finite)),
        graph.constant(np.array([axis])),
    )


def graphs_of(manifest: Manifest) -> dict[str, GraphWriter]:
    """Return the graphs that a bundle needs, by their names."""
    lm, precision = manifest.language_model, DTYPES[manifest.precision].name
    kinds: dict[str, tuple[Any, ...]] = {}
    if manifest.decodes:
        kinds[BEST] = (precision, lm.vocab_size)
    if manifest.projector is None:
        kinds[NOT_FINITE] = (precision,)
    # Tokens have places of their own exactly where positions have axes (`load_family`).
    if lm.rope_sections:
        kinds[AT_TOKENS] = (precision, lm.head_dim // 2)
        if MERGING_TOWER in manifest.graphs:
            merged = next(own for own in manifest.graphs[MERGING_TOWER].outputs if own.name == "merged")
            kinds[PLACES_OF] = (merged.shape[1],)
    # Only clips have texts between parts.
    if manifest.tokens.video is not None:
        kinds |= {IN_PARTS: (), IN_ORDER: (precision,)}
    return {name: WRITERS[name](*kind) for name, kind in kinds.items()}
