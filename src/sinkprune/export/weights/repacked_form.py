"""Matrices that the checkpoint has quantised, stored with its own codes and scales: nothing is rounded again."""

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

    def input_order(self, matrix: Matrix) -> Array | None:
        return self._form(matrix).input_order(matrix)

    def joins(self, matrix: Matrix) -> bool:
        """Return whether the checkpoint has quantised all parts, or none, and their form joins them."""
        same = len({self._weights.quantised(name) for name in matrix.parts}) == 1
        return same and self._form(matrix).joins(matrix)

    def _form(self, matrix: Matrix) -> WeightForm:
        """Return the form of the first part, which all parts of a joined matrix have."""
        return self._quantised if self._weights.quantised(next(iter(matrix.parts))) else self._floats


class RepackedForm(WeightForm):
    """Codes, scales and zero points of the checkpoint.

    A scale holds for a block of at most `most_in_block` inputs. A group's scale is repeated for each of its blocks,
    because engines have fast kernels for few block sizes. With 8 bits and one group, each output has one scale.
    """

    def __init__(self, weights: QuantisedWeights, most_in_block: int | None, on_read: Callable[[int], None]) -> None:
        """`on_read` receives the number of weights of each matrix that is read."""
        self._weights, self._most_in_block, self._on_read = weights, most_in_block, on_read
        self.least_opset = 19 if most_in_block is None else 21

    def input_order(self, matrix: Matrix) -> Array | None:
        return self._layers(matrix)[0].order

    def joins(self, matrix: Matrix) -> bool:
        """Return whether all parts take their inputs in the same order."""
        orders = {None if layer.order is None else layer.order.tobytes() for layer in self._layers(matrix)}
        return len(orders) == 1

    def matrix(self, graph: Matrices, matrix: Matrix) -> ir.Value:
        layers, quantisation = self._layers(matrix), self._weights.quantisation
        form, group = quantisation.form, layers[0].group
        block = None if self._most_in_block is None else block_of(matrix.name, group, self._most_in_block)

        def by_block(by_group: Sequence[Array]) -> Array:
            return np.repeat(_beside(by_group), group // (block or group), axis=0)

        def read() -> list[Array]:
            codes = _beside([layer.codes() for layer in layers])
            self._on_read(codes.size)
            # Reading the zero points checks that a symmetric matrix has the middle code alone.
            zeros = by_block([layer.zeros() for layer in layers])
            parts = zip(matrix.parts, layers, strict=True)
            scales = by_block([graph.precision.converted(f"{part}.scale", layer.scales()) for part, layer in parts])
            if form == "uint4":
                return [codes, scales, zeros]
            return [(codes - np.uint8(1 << (quantisation.bits - 1))).view(np.int8), scales]

        return dequantised(graph, matrix, form, block, read)

    def _layers(self, matrix: Matrix) -> Sequence[QuantisedLayer]:
        return [self._weights.layer(name, matrix.inputs, outputs) for name, outputs in matrix.parts.items()]


def _beside(parts: Sequence[Array]) -> Array:
    """Return `parts` [n,outputs], one next to the other."""
    return np.concatenate(parts, axis=1)
