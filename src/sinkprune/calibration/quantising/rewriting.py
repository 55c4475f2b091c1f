"""Graphs of a bundle, written again with matrices in another form."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from sinkprune.contract.precision import Array
from sinkprune.export.dialects import Dialect
from sinkprune.export.graph import Weight, WeightedGraph
from sinkprune.export.weights import Matrix, Precision, WeightForm

_PIXELS = "pixel_values"
"""A product with pixels embeds them and is no linear layer: exports store its matrix as floats."""


class RewrittenGraph(WeightedGraph):
    """The graph of an ONNX file, whose matrices of floats are stored in another form; all else stays."""

    def __init__(
        self,
        name: str,
        precision: Precision,
        dialect: Dialect,
        form: WeightForm,
        graph: ir.Graph,
        read_weight: Callable[[str], Array],
    ) -> None:
        """Rewrite `graph` in place. `save` calls `read_weight` for the weights that lie outside the ONNX file."""
        super().__init__(name, precision, dialect, form, self._read_matrix, graph)
        self._read_weight = read_weight
        multiplied, casts = multiplications(graph), set[ir.Node]()
        for weight, value in list(graph.initializers.items()):
            tensor = value.const_value
            if not isinstance(tensor, ir.ExternalTensor):
                continue
            if weight in multiplied:
                inputs, outputs = shape_of(tensor)
                casts |= {node for node, _ in value.uses() if node.op_type == "Cast"}
                del graph.initializers[weight]
                multiplied[weight].replace_input_with(1, form.matrix(self, Matrix(weight, {weight: outputs}, inputs)))
            else:
                self._weights[value] = self._same(weight, tensor)
        graph.remove(casts, safe=True)
        graph.sort()

    def _same(self, weight: str, tensor: ir.TensorProtocol) -> Weight:
        shape = ir.Shape(tensor.shape.numpy())
        return Weight(lambda: ir.Tensor(self._read_weight(weight)), tensor.dtype, shape, name=tensor.name)

    def _read_matrix(self, name: str, shape: Sequence[int]) -> Array:
        # It is stored transposed.
        array = self._read_weight(name).T
        return array if array.dtype in (np.float16, np.float32) else array.astype(np.float32)


def read_graph(data: bytes) -> ir.Graph:
    """Return the graph of an ONNX file that an export wrote, from its bytes `data`."""
    return ir.from_proto(onnx.ModelProto.FromString(data)).graph


def multiplications(graph: ir.Graph) -> dict[str, ir.Node]:
    """Return the MatMul of each linear layer by the name of its matrix of floats, in the order of the nodes."""
    found = {}
    for node in graph:
        if node.op_type != "MatMul" or node.inputs[0] is None or node.inputs[0].name == _PIXELS:
            continue
        value = node.inputs[1]
        source = value.producer() if value is not None else None
        if source is not None and source.op_type == "Cast":
            value = source.inputs[0]
        if value is not None and value.is_initializer() and value.name is not None:
            found[value.name] = node
    return found


def shape_of(matrix: ir.TensorProtocol) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a linear layer's matrix."""
    inputs, outputs = matrix.shape.numpy()
    return inputs, outputs
