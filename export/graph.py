"""One ONNX graph under construction: named inputs and outputs, and weights that stream to disk.

Graphs are written operator by operator (`graph.op.MatMul(x, w)`), so that what stands in the file is what stands in
the source. A weight goes from the checkpoint to its place in the external-data file the moment it is named: no
export ever holds more than a few tensors in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import onnx
import onnx_ir as ir
from onnxscript import GraphBuilder

from sinkprune.contract.errors import CheckpointError
from sinkprune.contract.manifest import GraphSpec, TensorSpec
from sinkprune.export.dialects import Dialect
from sinkprune.export.precision import Precision

# Offsets a runtime can map; 4096 is the page size ONNX asks for, where a page per tensor is no waste.
_PAGE = 4096
_LINE = 64

Dim = int | str


class Weights(Protocol):
    """Where weights come from: a checkpoint, or a seeded random generator."""

    def tensor(self, name: str, shape: Sequence[int]) -> np.ndarray[Any, Any]:
        """The tensor `name`; raises `CheckpointError` if it is missing or not of `shape`."""
        ...

    def __contains__(self, name: str) -> bool: ...


class Graph:
    """A graph without weights; `WeightedGraph` adds them."""

    def __init__(self, name: str, precision: Precision, dialect: Dialect) -> None:
        self.name = name
        self.precision = precision
        self.dialect = dialect
        graph = ir.Graph([], [], nodes=[], opset_imports={"": dialect.OPSET}, name=name)
        self.builder = GraphBuilder(graph)
        self.op = self.builder.op
        self._graph = graph

    @property
    def float(self) -> ir.DataType:
        """The bundle's float type."""
        return self.precision.onnx

    def input(self, name: str, shape: Sequence[Dim], dtype: ir.DataType | None = None) -> ir.Value:
        """Declare an input; `dtype` is the bundle's float type unless given."""
        return self.builder.input(name, dtype or self.float, list(shape))

    def output(self, name: str, value: ir.Value, shape: Sequence[Dim], dtype: ir.DataType | None = None) -> None:
        """Declare an output, with the type and shape the contract gives it."""
        value.type = ir.TensorType(dtype or self.float)
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
        inputs = tuple(_spec(value) for value in self._graph.inputs)
        return GraphSpec(file, inputs, tuple(_spec(value) for value in self._graph.outputs))


class WeightedGraph(Graph):
    """A graph whose weights stream from `weights` into one external-data file `data` beside it.

    `location` is the file's path relative to the graph's, as the graph names it.
    """

    def __init__(
        self, name: str, precision: Precision, dialect: Dialect, weights: Weights, data: BinaryIO, location: str
    ) -> None:
        super().__init__(name, precision, dialect)
        self._weights = weights
        self._data = data
        self._location = location

    def parameter(self, name: str, shape: Sequence[int], *, transposed: bool = False, flat: bool = False) -> ir.Value:
        """The checkpoint's tensor `name` of `shape`, in the bundle's precision, as an initializer.

        `flat` joins all axes behind the first, `transposed` then turns the axes round.
        """
        array = self._weights.tensor(name, shape)
        with np.errstate(over="ignore"):
            converted = array.astype(self.precision.numpy)
        if not np.isfinite(converted).all():
            raise CheckpointError(
                f"tensor '{name}' holds values that are not finite in {self.precision.name} (largest magnitude "
                f"{np.abs(array.astype(np.float32)).max():.3g}). Export with --precision fp32, or check the download."
            )
        if flat:
            converted = converted.reshape(len(converted), -1)
        return self._stream(name, converted.T if transposed else converted)

    def linear(self, x: ir.Value, name: str, inputs: int, outputs: int, *, bias: bool) -> ir.Value:
        """`x @ weight.T + bias`, with the weight stored [inputs, outputs] as MatMul reads it."""
        y = self.op.MatMul(x, self.parameter(f"{name}.weight", [outputs, inputs], transposed=True))
        return self.op.Add(y, self.parameter(f"{name}.bias", [outputs])) if bias else y

    def _stream(self, name: str, array: np.ndarray[Any, Any]) -> ir.Value:
        alignment = _PAGE if array.nbytes >= _PAGE else _LINE
        self._data.write(b"\0" * (-self._data.tell() % alignment))
        offset = self._data.tell()
        self._data.write(np.ascontiguousarray(array).data)
        tensor = ir.ExternalTensor(
            self._location, offset, array.nbytes, self.float, shape=ir.Shape(array.shape), name=name
        )
        return self.builder.initializer(tensor, name)


def _spec(value: ir.Value) -> TensorSpec:
    if value.name is None or value.dtype is None or value.shape is None:
        raise ValueError(f"graph input or output without a type: {value}")
    dtypes = {
        ir.DataType.FLOAT: "float32",
        ir.DataType.FLOAT16: "float16",
        ir.DataType.INT64: "int64",
        ir.DataType.BOOL: "bool",
    }
    shape = tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape)
    return TensorSpec(value.name, dtypes[value.dtype], shape)  # type: ignore[arg-type]
