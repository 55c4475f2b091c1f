"""One ONNX graph under construction: named inputs and outputs, and weights that are read when they are written.

Graphs are written operator by operator (`graph.op.MatMul(x, w)`), so that what stands in the file is what stands in
the source. A weight goes from the checkpoint to its place in the external-data file when the graph is saved, one
after the other: no export ever holds more than a few tensors in memory.
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
from sinkprune.export.precision import Precision
from sinkprune.export.weights.weight_forms import Matrix, WeightForm, below

# A tensor of a page or more starts on one, so that a runtime can map it.
_PAGE = 4096

Dim = int | str

ReadTensor = Callable[[str, Sequence[int]], Array]
"""Gives the checkpoint's tensor of a name and a shape; raises `CheckpointError` if it is missing or not of it."""


class Graph:
    """A graph without weights; `WeightedGraph` adds them."""

    def __init__(
        self, name: str, precision: Precision, dialect: Dialect, least_opset: int = 1, begun: ir.Graph | None = None
    ) -> None:
        """Without operators yet, or with those of `begun`; of the dialect's opset, or of `least_opset` where that is
        a later one."""
        self.name = name
        self.precision = precision
        self.dialect = dialect
        self._graph = begun or ir.Graph([], [], nodes=[], name=name)
        self._graph.opset_imports[""] = max(dialect.OPSET, least_opset)
        self.builder = GraphBuilder(self._graph)
        self.op = self.builder.op

    def input(self, name: str, shape: Sequence[Dim], dtype: ir.DataType | None = None) -> ir.Value:
        """Declare an input; `dtype` is the bundle's float type unless given."""
        return self.builder.input(name, dtype or self.precision.onnx, list(shape))

    def output(self, name: str, value: ir.Value, shape: Sequence[Dim], dtype: ir.DataType | None = None) -> None:
        """Declare an output, with the type and shape the contract gives it."""
        value.type = ir.TensorType(dtype or self.precision.onnx)
        value.shape = ir.Shape(list(shape))
        self.builder.add_output(value, name)

    def save(self, root: Path, file: str) -> GraphSpec:
        """Write the graph to `root / file`, and return its interface."""
        for domain in {function.domain for function in self.builder.functions.values()}:
            self._graph.opset_imports[domain] = 1
        functions = list(self.builder.functions.values())
        for node in [*self._graph, *(node for function in functions for node in function)]:
            # Scopes of the builder's module system, which these graphs do not use.
            node.metadata_props.clear()
        model = ir.Model(
            self._graph, ir_version=self.dialect.IR_VERSION, producer_name="sinkprune", functions=functions
        )
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        onnx.save(ir.to_proto(model), root / file)
        return self.interface(file)

    def interface(self, file: str) -> GraphSpec:
        """What it takes and gives, as the graph in `file`."""
        inputs = tuple(_spec(value) for value in self._graph.inputs)
        return GraphSpec(file, inputs, tuple(_spec(value) for value in self._graph.outputs))


class _Weight(ir.LazyTensor):
    """A weight, read when it is written."""

    def tofile(self, file: Any) -> None:
        tensor = self.raw()
        array = tensor.numpy_packed() if isinstance(tensor, ir.PackedTensor) else tensor.numpy()
        # What numpy raises where the disk is full does not say so. As bytes: not every type of ours is numpy's own.
        file.write(np.ascontiguousarray(array).view(np.uint8).data)


class WeightedGraph(Graph):
    """A graph whose weights `read` gives, and lie in the file `weights/<name>.bin` beside it.

    Matrices of linear layers are stored in `form`, all else in the type of the graph's precision.
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
        self._weights: dict[ir.Value, _Weight] = {}

    @property
    def bytes(self) -> int:
        """How many bytes its weights take."""
        return sum(weight.nbytes for weight in self._weights.values())

    @property
    def largest(self) -> int:
        """How many values its largest weight has."""
        return max((weight.size for weight in self._weights.values()), default=0)

    def parameter(self, name: str, shape: Sequence[int], *, transposed: bool = False, flat: bool = False) -> ir.Value:
        """The checkpoint's tensor `name` of `shape`, in the bundle's precision, as an initializer.

        `flat` joins all axes behind the first, `transposed` then turns the axes round. It is read by `save`.
        """
        stored = [shape[0], prod(shape[1:])] if flat else list(shape)

        def read() -> ir.Tensor[Any]:
            array = self.precision.converted(name, self.read(name, shape)).reshape(stored)
            return ir.Tensor(array.T if transposed else array)

        return self.stored(name, self.precision.onnx, stored[::-1] if transposed else stored, read)

    def stored(
        self, name: str, dtype: ir.DataType, shape: Sequence[int], read: Callable[[], ir.TensorProtocol]
    ) -> ir.Value:
        """Return a new initializer of that name, type and shape. `save` calls `read` for its values."""
        weight = _Weight(read, dtype, ir.Shape(shape), name=name)
        value = self.builder.initializer(weight, name)
        self._weights[value] = weight
        return value

    def kept(self, value: ir.Value, tensor: ir.TensorProtocol, read: Callable[[], Array]) -> None:
        """An initializer of the graph that was begun, `tensor`; `read` gives its values, and they are written with
        the others."""
        shape = ir.Shape(tensor.shape.numpy())
        self._weights[value] = _Weight(lambda: ir.Tensor(read()), tensor.dtype, shape, name=tensor.name)

    def linear(self, x: ir.Value, name: str, inputs: int, outputs: int, *, bias: bool) -> ir.Value:
        """`x @ weight.T + bias`, with the matrix in this graph's form."""
        return self._linear(x, name, {name: outputs}, inputs, bias=bias)

    def linears(
        self, x: ir.Value, name: str, parts: Mapping[str, int], inputs: int, *, bias: bool
    ) -> Sequence[ir.Value]:
        """`linear` of the same `x` for each of `parts`, names and their outputs.

        They are one product with the matrix `name`, and then split, where this graph's form can join them: small
        products take longer than their bytes. What each part gives is a value of its name then.
        """
        if not self.form.joins(_matrix(name, parts, inputs)):
            return [self.linear(x, part, inputs, outputs, bias=bias) for part, outputs in parts.items()]
        y = self._linear(x, name, parts, inputs, bias=bias)
        split: Sequence[ir.Value] = self.op.Split(y, list(parts.values()), axis=-1, _outputs=len(parts))
        for value, part in zip(split, parts, strict=True):
            # Given here, as the builder puts letters in front of names of its own.
            value.name = part
        return split

    def _linear(self, x: ir.Value, name: str, parts: Mapping[str, int], inputs: int, *, bias: bool) -> ir.Value:
        matrix = _matrix(name, parts, inputs)
        order = self.form.input_order(matrix)
        if order is not None:
            stored = self.stored(f"{matrix.name}.order", ir.DataType.INT64, [inputs], lambda: ir.Tensor(order))
            x = self.op.Gather(x, stored, axis=-1)
        y = self.op.MatMul(x, self.form.matrix(self, matrix))
        return self.op.Add(y, self._bias(name, parts)) if bias else y

    def _bias(self, name: str, parts: Mapping[str, int]) -> ir.Value:
        def read() -> ir.Tensor[Any]:
            names = {f"{part}.bias": outputs for part, outputs in parts.items()}
            return ir.Tensor(
                below([self.precision.converted(part, self.read(part, [outputs])) for part, outputs in names.items()])
            )

        return self.stored(f"{name}.bias", self.precision.onnx, [sum(parts.values())], read)

    def save(self, root: Path, file: str) -> GraphSpec:
        """Write the weights, then the graph; raises `CheckpointError` where a weight is not as it must be."""
        folder, location = (root / file).parent, f"weights/{self.name}.bin"
        (folder / location).parent.mkdir(parents=True, exist_ok=True)
        weights = list(self._weights.values())
        written = convert_tensors_to_external(weights, folder, location, alignment=_PAGE, align_threshold=_PAGE - 1)
        for value, tensor in zip(self._weights, written, strict=True):
            value.const_value = tensor
        return super().save(root, file)


def _matrix(name: str, parts: Mapping[str, int], inputs: int) -> Matrix:
    """The matrix of the linear layers `parts`, names and their outputs, as that of the layer `name`."""
    return Matrix(f"{name}.weight", {f"{part}.weight": outputs for part, outputs in parts.items()}, inputs)


def _spec(value: ir.Value) -> TensorSpec:
    if value.name is None or value.dtype is None or value.shape is None:
        raise ValueError(f"graph input or output without a type: {value}")
    shape = tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape)
    return TensorSpec(value.name, value.dtype.numpy().name, shape)  # type: ignore[arg-type]
