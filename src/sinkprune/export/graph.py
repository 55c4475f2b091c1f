"""Graphs that are written node by node.

Code adds operators one by one (`graph.op.MatMul(x, w)`), so the file holds what the source shows. `save` copies one
weight after the other from the checkpoint to the file of weights. So an export holds only a few tensors in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.external_data import convert_tensors_to_external
from onnxscript import GraphBuilder

from sinkprune.contract.manifest import GraphSpec, TensorSpec
from sinkprune.contract.precision import Array
from sinkprune.export.dialects import Dialect
from sinkprune.export.weights import Matrix, Precision, WeightForm, concatenated

# A tensor of a page or more starts on a page, so that a runtime can map it.
_PAGE = 4096

Dim = int | str
FLOAT, INT64, BOOL = ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.BOOL

ReadTensor = Callable[[str, Sequence[int]], Array]
"""Returns the checkpoint's tensor of a name and a shape; raises `CheckpointError` if it has no such tensor."""


class Graph:
    """A graph without weights; `WeightedGraph` adds them."""

    def __init__(
        self, name: str, precision: Precision, dialect: Dialect, least_opset: int = 1, begun: ir.Graph | None = None
    ) -> None:
        """Start empty, or from the graph `begun`. The opset is the dialect's, or `least_opset` if that is later."""
        self.name = name
        self.precision = precision
        self.dialect = dialect
        self._graph = begun or ir.Graph([], [], nodes=[], name=name)
        self._graph.opset_imports[""] = max(dialect.OPSET, least_opset)
        self.builder = GraphBuilder(self._graph)
        self.op = self.builder.op

    def input(self, name: str, shape: Sequence[Dim], dtype: ir.DataType | None = None) -> ir.Value:
        """Declare an input. `dtype` defaults to the bundle's float type."""
        return self.builder.input(name, dtype or self.precision.onnx, list(shape))

    def output(self, name: str, value: ir.Value, shape: Sequence[Dim], dtype: ir.DataType | None = None) -> None:
        """Declare an output, with the type and shape of the graph contract."""
        value.type = ir.TensorType(dtype or self.precision.onnx)
        value.shape = ir.Shape(list(shape))
        self.builder.add_output(value, name)

    def save(self, root: Path, file: str) -> GraphSpec:
        """Write the graph to `root / file`, and return its interface."""
        for domain in dict.fromkeys(function.domain for function in self.builder.functions.values()):
            self._graph.opset_imports[domain] = 1
        functions = list(self.builder.functions.values())
        for node in [*self._graph, *(node for function in functions for node in function)]:
            # The builder writes scopes of modules, which these graphs do not have.
            node.metadata_props.clear()
        model = ir.Model(
            self._graph, ir_version=self.dialect.IR_VERSION, producer_name="sinkprune", functions=functions
        )
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        onnx.save(ir.to_proto(model), root / file)
        return self.interface(file)

    def interface(self, file: str) -> GraphSpec:
        """Return the inputs and outputs, as those of the graph in `file`."""
        inputs = tuple(_spec(value) for value in self._graph.inputs)
        return GraphSpec(file, inputs, tuple(_spec(value) for value in self._graph.outputs))


class Weight(ir.LazyTensor):
    """A weight that is read when it is written."""

    def tofile(self, file: Any) -> None:
        tensor = self.raw()
        array = tensor.numpy_packed() if isinstance(tensor, ir.PackedTensor) else tensor.numpy()
        # numpy's own `tofile` hides that the disk is full. As bytes, because numpy lacks some of the types.
        file.write(np.ascontiguousarray(array).view(np.uint8).data)


class WeightedGraph(Graph):
    """A graph with weights, which `read` returns and `save` stores next to the graph in `weights/<name>.bin`.

    Matrices of linear layers are stored in `form`, all other weights in the type of the graph's precision.
    """

    def __init__(
        self,
        name: str,
        precision: Precision,
        dialect: Dialect,
        form: WeightForm,
        read: ReadTensor,
        begun: ir.Graph | None = None,
    ) -> None:
        super().__init__(name, precision, dialect, form.least_opset, begun)
        self.form, self.read = form, read
        self.values = 0
        """The values of the checkpoint's tensors that `save` reads."""
        self._weights: dict[ir.Value, Weight] = {}

    @property
    def bytes(self) -> int:
        """The bytes of all weights."""
        return sum(weight.nbytes for weight in self._weights.values())

    @property
    def largest(self) -> int:
        """The number of values of the largest weight."""
        return max((weight.size for weight in self._weights.values()), default=0)

    def parameter(
        self, name: str, shape: Sequence[int], *, transposed: bool = False, flat: bool = False, plus: float = 0.0
    ) -> ir.Value:
        """Return an initializer: the checkpoint's tensor `name` of `shape`, in the bundle's precision.

        `flat` joins all axes after the first; then `transposed` reverses the axes. `plus` is added to each value.
        """
        stored = [shape[0], prod(shape[1:])] if flat else list(shape)
        self.values += prod(shape)

        def read() -> ir.Tensor[Any]:
            values = self.read(name, shape)
            values = values.astype(np.float32) + np.float32(plus) if plus else values
            array = self.precision.converted(name, values).reshape(stored)
            return ir.Tensor(array.T if transposed else array)

        return self.stored(name, self.precision.onnx, stored[::-1] if transposed else stored, read)

    def stored(
        self, name: str, dtype: ir.DataType, shape: Sequence[int], read: Callable[[], ir.TensorProtocol]
    ) -> ir.Value:
        """Return a new initializer of that name, type and shape. `save` calls `read` for its values."""
        weight = Weight(read, dtype, ir.Shape(shape), name=name)
        value = self.builder.initializer(weight, name)
        self._weights[value] = weight
        return value

    def linear(self, x: ir.Value, name: str, inputs: int, outputs: int, *, bias: bool) -> ir.Value:
        """Return `x @ weight.T + bias`, with the matrix in this graph's form."""
        return self._linear(x, name, {name: outputs}, inputs, bias=bias)

    def joined(self, x: ir.Value, name: str, parts: Mapping[str, int], inputs: int, *, bias: bool) -> ir.Value:
        """Return `linear` of the same `x` for each of `parts`, names and their outputs, beside each other.

        If this graph's form can join the parts, they are one product with the matrix `name`: one large product is
        faster than several small ones.
        """
        if self.form.joins(_matrix(name, parts, inputs)):
            return self._linear(x, name, parts, inputs, bias=bias)
        each = [self.linear(x, part, inputs, outputs, bias=bias) for part, outputs in parts.items()]
        return self.op.Concat(*each, axis=-1)

    def _linear(self, x: ir.Value, name: str, parts: Mapping[str, int], inputs: int, *, bias: bool) -> ir.Value:
        matrix = _matrix(name, parts, inputs)
        self.values += inputs * sum(parts.values())
        order = self.form.input_order(matrix)
        if order is not None:
            stored = self.stored(f"{matrix.name}.order", ir.DataType.INT64, [inputs], lambda: ir.Tensor(order))
            x = self.op.Gather(x, stored, axis=-1)
        y = self.op.MatMul(x, self.form.matrix(self, matrix))
        return self.op.Add(y, self._bias(name, parts)) if bias else y

    def _bias(self, name: str, parts: Mapping[str, int]) -> ir.Value:
        self.values += sum(parts.values())

        def read() -> ir.Tensor[Any]:
            names = {f"{part}.bias": outputs for part, outputs in parts.items()}
            return ir.Tensor(
                concatenated(
                    [self.precision.converted(part, self.read(part, [outputs])) for part, outputs in names.items()]
                )
            )

        return self.stored(f"{name}.bias", self.precision.onnx, [sum(parts.values())], read)

    def save_with_weights_of(self, other: WeightedGraph, root: Path, file: str) -> GraphSpec:
        """Write the graph, which reads weights that `other` has saved in the same folder."""
        held = {value.name: value.const_value for value in other._weights}
        for value in self._weights:
            value.const_value = held[value.name]
        return super().save(root, file)

    def save(self, root: Path, file: str) -> GraphSpec:
        """Write the weights, then the graph; raises `CheckpointError` for a weight that does not fit."""
        folder, location = (root / file).parent, f"weights/{self.name}.bin"
        (folder / location).parent.mkdir(parents=True, exist_ok=True)
        weights = list(self._weights.values())
        written = convert_tensors_to_external(weights, folder, location, alignment=_PAGE, align_threshold=_PAGE - 1)
        for value, tensor in zip(self._weights, written, strict=True):
            value.const_value = tensor
        return super().save(root, file)


def _matrix(name: str, parts: Mapping[str, int], inputs: int) -> Matrix:
    return Matrix(f"{name}.weight", {f"{part}.weight": outputs for part, outputs in parts.items()}, inputs)


def _spec(value: ir.Value) -> TensorSpec:
    if value.name is None or value.dtype is None or value.shape is None:
        raise ValueError(f"graph input or output without a type: {value}")
    shape = tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape)
    return TensorSpec(value.name, value.dtype.numpy().name, shape)  # type: ignore[arg-type]
