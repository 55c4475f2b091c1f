"""Matrices that a checkpoint has quantised, in its own codes and scales: nothing is rounded a second time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from sinkprune.contract.precision import Array
from sinkprune.export.weights.quantised_weights import QuantisedLayer, QuantisedWeights
from sinkprune.export.weights.weight_forms import Matrices, Matrix, WeightForm, block_of, dequantised


class CheckpointForm(WeightForm):
    """One form for the matrices that the checkpoint has quantised, another for those that it has left in floats."""

    def __init__(self, weights: QuantisedWeights, quantised: WeightForm, floats: WeightForm) -> None:
        self._weights, self._quantised, self._floats = weights, quantised, floats
        self.least_opset = max(quantised.least_opset, floats.least_opset)

    def matrix(self, graph: Matrices, matrix: Matrix) -> ir.Value:
        return self._form(matrix).matrix(graph, matrix)

    def joins(self, matrix: Matrix) -> bool:
        """Where the checkpoint has quantised all parts, or none."""
        same = len({self._weights.quantised(name) for name in matrix.parts}) == 1
        return same and self._form(matrix).joins(matrix)

    def product(self, graph: Matrices, x: ir.Value, matrix: Matrix) -> ir.Value:
        return self._form(matrix).product(graph, x, matrix)

    def _form(self, matrix: Matrix) -> WeightForm:
        """That of its parts, which is the same for all."""
        return self._quantised if self._weights.quantised(next(iter(matrix.parts))) else self._floats


class RepackedForm(WeightForm):
    """Codes, scales and zero points as the checkpoint has them.

    A scale stands for each block of at most `most_in_block` inputs: a group's scale is repeated for each of its
    blocks, because engines have fast kernels for few sizes. With 8 bits and one group there is one scale an output.
    """

    def __init__(self, weights: QuantisedWeights, most_in_block: int | None, on_read: Callable[[int], None]) -> None:
        """`on_read` is told how many weights have been read."""
        self._weights, self._most_in_block, self._on_read = weights, most_in_block, on_read
        self.least_opset = 19 if most_in_block is None else 21

    def joins(self, matrix: Matrix) -> bool:
        """Where all parts take their inputs in the same order."""
        orders = {None if layer.order is None else layer.order.tobytes() for layer in self._layers(matrix)}
        return len(orders) == 1

    def product(self, graph: Matrices, x: ir.Value, matrix: Matrix) -> ir.Value:
        """`x` [...,inputs] times the matrix, its inputs in the order of the matrix's groups."""
        layers = self._layers(matrix)
        order = layers[0].order
        if order is not None:
            stored = graph.stored(
                f"{matrix.name}.order", ir.DataType.INT64, [matrix.inputs], lambda: ir.Tensor(order)
            )
            x = graph.op.Gather(x, stored, axis=-1)
        product: ir.Value = graph.op.MatMul(x, self._matrix(graph, layers, matrix))
        return product

    def matrix(self, graph: Matrices, matrix: Matrix) -> ir.Value:
        """Of a matrix whose groups are in order; raises `ValueError` for others."""
        layers = self._layers(matrix)
        if layers[0].order is not None:
            raise ValueError(f"'{matrix.name}' takes its inputs in an order of its own: ask for the product")
        return self._matrix(graph, layers, matrix)

    def _layers(self, matrix: Matrix) -> Sequence[QuantisedLayer]:
        return [self._weights.layer(name, matrix.inputs, outputs) for name, outputs in matrix.parts.items()]

    def _matrix(self, graph: Matrices, layers: Sequence[QuantisedLayer], matrix: Matrix) -> ir.Value:
        quantisation, group = self._weights.quantisation, layers[0].group
        form = quantisation.form
        block = None if self._most_in_block is None else block_of(matrix.name, group, self._most_in_block)

        def by_block(by_group: Sequence[Array]) -> Array:
            return np.repeat(_beside(by_group), group // (block or group), axis=0)

        def codes() -> Array:
            found = _beside([layer.codes() for layer in layers])
            self._on_read(found.size)
            return found if form == "uint4" else (found - np.uint8(1 << (quantisation.bits - 1))).view(np.int8)

        def scales() -> Array:
            scales = []
            for part, layer in zip(matrix.parts, layers, strict=True):
                # Whether it is symmetric is known by its zero points alone.
                layer.zeros()
                scales.append(graph.precision.converted(f"{part}.scale", layer.scales()))
            return by_block(scales)

        def zeros() -> Array:
            return by_block([layer.zeros() for layer in layers])

        return dequantised(graph, matrix, form, block, codes, scales, zeros if form == "uint4" else None)


def _beside(parts: Sequence[Array]) -> Array:
    """`parts` [n,outputs], one beside the other."""
    return np.concatenate(parts, axis=1)
