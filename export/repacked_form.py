"""Matrices that a checkpoint has quantised, in its own codes and scales: nothing is rounded a second time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import onnx_ir as ir

from sinkprune.contract.precision import Array
from sinkprune.export.quantised_weights import QuantisedLayer, QuantisedWeights
from sinkprune.export.weight_forms import Matrices, WeightForm, block_of, stored_4_bits, typed


class CheckpointForm(WeightForm):
    """One form for the matrices that the checkpoint has quantised, another for those that it has left in floats."""

    def __init__(self, weights: QuantisedWeights, quantised: WeightForm, floats: WeightForm) -> None:
        self._weights, self._quantised, self._floats = weights, quantised, floats
        self.least_opset = max(quantised.least_opset, floats.least_opset)

    def matrix(self, graph: Matrices, name: str, inputs: int, outputs: int) -> ir.Value:
        return self._form(name).matrix(graph, name, inputs, outputs)

    def product(self, graph: Matrices, x: ir.Value, name: str, inputs: int, outputs: int) -> ir.Value:
        return self._form(name).product(graph, x, name, inputs, outputs)

    def _form(self, name: str) -> WeightForm:
        return self._quantised if self._weights.quantised(name) else self._floats


class RepackedForm(WeightForm):
    """Codes, scales and zero points as the checkpoint has them.

    A scale stands for each block of at most `most_in_block` inputs: a group's scale is repeated for each of its
    blocks, because engines have fast kernels for few sizes. With 8 bits and one group there is one scale an output.
    """

    def __init__(self, weights: QuantisedWeights, most_in_block: int | None, on_read: Callable[[int], None]) -> None:
        """`on_read` is told how many weights have been read."""
        self._weights, self._most_in_block, self._on_read = weights, most_in_block, on_read
        self.least_opset = 19 if most_in_block is None else 21

    def product(self, graph: Matrices, x: ir.Value, name: str, inputs: int, outputs: int) -> ir.Value:
        """`x` [...,inputs] times the matrix, its inputs in the order of the matrix's groups."""
        layer = self._weights.layer(name, inputs, outputs)
        if layer.order is not None:
            order = layer.order
            x = graph.op.Gather(
                x, graph.stored(f"{name}.order", ir.DataType.INT64, [inputs], lambda: ir.Tensor(order)), axis=-1
            )
        product: ir.Value = graph.op.MatMul(x, self._matrix(graph, layer, name, inputs, outputs))
        return product

    def matrix(self, graph: Matrices, name: str, inputs: int, outputs: int) -> ir.Value:
        """Of a matrix whose groups are in order; raises `ValueError` for others."""
        layer = self._weights.layer(name, inputs, outputs)
        if layer.order is not None:
            raise ValueError(f"'{name}' takes its inputs in an order of its own: ask for the product")
        return self._matrix(graph, layer, name, inputs, outputs)

    def _matrix(self, graph: Matrices, layer: QuantisedLayer, name: str, inputs: int, outputs: int) -> ir.Value:
        quantisation, op = self._weights.quantisation, graph.op
        if self._most_in_block is None:
            block, shape, place = inputs, [outputs], {"axis": 1}
        else:
            block = block_of(name, layer.group, self._most_in_block)
            shape, place = [inputs // block, outputs], {"axis": 0, "block_size": block}

        def by_block(by_group: Array) -> Array:
            return np.repeat(by_group, layer.group // block, axis=0).reshape(shape)

        def codes() -> Array:
            found = layer.codes()
            self._on_read(found.size)
            return found if form == "uint4" else (found - np.uint8(1 << (quantisation.bits - 1))).view(np.int8)

        def scales() -> ir.Tensor[Array]:
            # Whether it is symmetric is known by its zero points alone.
            layer.zeros()
            scale = f"{name}.scale"
            return ir.Tensor(by_block(graph.precision.converted(scale, layer.scales())))

        form = quantisation.form
        four_bits = partial(stored_4_bits, graph)
        if form == "int8":
            stored = graph.stored(name, ir.DataType.INT8, [inputs, outputs], lambda: ir.Tensor(codes()))
        else:
            stored = four_bits(name, ir.DataType[form.upper()], [inputs, outputs], codes)
        operands = [stored, graph.stored(f"{name}.scale", graph.precision.onnx, shape, scales)]
        if form == "uint4":
            operands.append(four_bits(f"{name}.zero", ir.DataType.UINT4, shape, lambda: by_block(layer.zeros())))
        return typed(graph, op.DequantizeLinear(*operands, **place), stored)
