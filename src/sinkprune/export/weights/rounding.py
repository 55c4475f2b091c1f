"""Weights that are rounded to 8 and 4 bits at export."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx_ir as ir

from sinkprune.contract.errors import UsageError
from sinkprune.contract.precision import BLOCK_SIZES, Array, WeightsName
from sinkprune.export.weights import Matrix, OnRounded, WeightForm, concatenated, largest_block

if TYPE_CHECKING:
    from sinkprune.export.graph import WeightedGraph

# This many values fit into a core's second cache.
_CHUNK = 1 << 17


class RoundedMatrix(NamedTuple):
    """A matrix [outputs,inputs] as codes, scales and zero points of blocks of inputs.

    Value (o,i) is (codes[o,i] - zeros[o,b]) * scales[o,b] with b = i // block.
    """

    codes: Array
    """[outputs,inputs] int8, from -most to most; or uint8, from 0 to most, if there are zero points."""
    scales: Array
    """[outputs,blocks] floats above 0."""
    zeros: Array | None = None
    """[outputs,blocks] uint8: the codes of zero; None if that is 0."""

    def values(self) -> Array:
        """Return the matrix [outputs,inputs] fp32."""
        values: Array = self.codes.astype(np.float32, order="C")
        # A view, whose changes are those of `values`.
        blocks = values.reshape(*self.scales.shape, -1)
        if self.zeros is not None:
            blocks -= self.zeros[..., None]
        blocks *= self.scales.astype(np.float32)[..., None]
        return values


RoundingMethod = Callable[[str, Array, int, int, np.dtype[Any]], RoundedMatrix]
"""Returns the matrix of a name, rounded as by `rounded` or nearer by another measure."""


def to_nearest(name: str, weight: Array, most: int, block: int, dtype: np.dtype[Any]) -> RoundedMatrix:
    """Return `rounded` of the matrix, whatever its name."""
    return rounded(weight, most, block, dtype)


def rounded(weight: Array, most: int, block: int, dtype: np.dtype[Any]) -> RoundedMatrix:
    """Return `weight` [outputs,inputs] in codes up to `most` (127 for int8, 7 for int4), with a scale per `block`.

    Scales have `dtype`, and codes are rounded with the stored scales. The largest value of each block is exact, up to
    the rounding of its scale. `block` divides the inputs.
    """
    outputs, inputs = weight.shape
    codes, scales = np.empty((outputs, inputs), np.int8), np.empty((outputs, inputs // block), dtype)
    for rows, blocks in _in_chunks(weight, block):
        largest = np.maximum(blocks.max(axis=-1), -blocks.min(axis=-1))
        scale = stored_scales(largest / np.float32(most), dtype)
        scales[rows] = scale
        blocks /= scale.astype(np.float32)[..., None]
        np.rint(blocks, out=blocks)
        np.clip(blocks, -most, most, out=blocks)
        codes[rows] = blocks.reshape(-1, inputs)
    return RoundedMatrix(codes, scales)


def rounded_from_zero(weight: Array, most: int, block: int, dtype: np.dtype[Any]) -> RoundedMatrix:
    """Return `weight` [outputs,inputs] in codes from 0 to `most` (15 for uint4), with a scale and zero point per
    `block`.

    Scales have `dtype`, and codes are rounded with the stored scales. A block's range is extended to zero, which is
    exact. `block` divides the inputs.
    """
    outputs, inputs = weight.shape
    codes, scales = np.empty((outputs, inputs), np.uint8), np.empty((outputs, inputs // block), dtype)
    zeros = np.empty(scales.shape, np.uint8)
    for rows, blocks in _in_chunks(weight, block):
        low, high = np.minimum(blocks.min(axis=-1), 0), np.maximum(blocks.max(axis=-1), 0)
        # Divided before the sum, because the sum of two large values may overflow.
        scale = stored_scales(high / np.float32(most) - low / np.float32(most), dtype)
        scales[rows] = scale
        wide = scale.astype(np.float32)
        zero = np.clip(np.rint(-low / wide), 0, most)
        zeros[rows] = zero
        blocks /= wide[..., None]
        np.rint(blocks, out=blocks)
        blocks += zero[..., None]
        np.clip(blocks, 0, most, out=blocks)
        codes[rows] = blocks.reshape(-1, inputs)
    return RoundedMatrix(codes, scales, zeros)


def _in_chunks(weight: Array, block: int) -> Iterator[tuple[slice, Array]]:
    """Yield slices of rows of `weight` [outputs,inputs], and copies of these rows [rows,blocks,block] fp32."""
    outputs, inputs = weight.shape
    step = max(1, _CHUNK // inputs)
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        yield rows, weight[rows].astype(np.float32).reshape(-1, inputs // block, block)


def stored_scales(scales: Array, dtype: np.dtype[Any]) -> Array:
    """Return `scales` in the range of `dtype`: finite, and never 0, because engines divide by them."""
    limits = np.finfo(dtype)
    return np.clip(scales, limits.tiny, limits.max).astype(dtype)


def packed(codes: Array) -> Array:
    """Return bytes [n] uint8 that each hold two 4-bit `codes` from -8 to 15, the first in the low half.

    Codes are in row-major order. An odd last code is followed by zeros (onnx.proto3, `TensorProto.INT4`).
    """
    flat = np.ascontiguousarray(codes).view(np.uint8).ravel()
    if flat.size % 2:
        flat = np.append(flat, np.uint8(0))
    low, high = flat[0::2] & 15, flat[1::2] << 4
    return low | high


class RoundedForm(WeightForm):
    """Rounded at export: int8 with a scale for each output, int4 and uint4 with a scale for each block of inputs."""

    def __init__(
        self, name: WeightsName, most_in_block: int | None, rounding: RoundingMethod, on_rounded: OnRounded
    ) -> None:
        self._name, self._most_in_block = name, most_in_block
        self._rounding, self._on_rounded = rounding, on_rounded
        self.least_opset = 19 if most_in_block is None else 21

    def matrix(self, graph: WeightedGraph, matrix: Matrix) -> ir.Value:
        block = None if self._most_in_block is None else block_of(matrix.name, matrix.inputs, self._most_in_block)

        def read() -> list[Array]:
            parts = [self._rounded(graph, name, weight, block) for name, weight in matrix.read(graph)]
            return [concatenated(same).T for same in zip(*parts, strict=True) if same[0] is not None]

        return dequantised(graph, matrix, self._name, block, read)

    def _rounded(self, graph: WeightedGraph, name: str, weight: Array, block: int | None) -> RoundedMatrix:
        # Reject what the graph's type cannot hold, but round the values as read.
        graph.precision.converted(name, weight)
        block, dtype = block or weight.shape[1], graph.precision.numpy
        if self._name == "uint4":
            found = rounded_from_zero(weight, 15, block, dtype)
        else:
            found = self._rounding(name, weight, 127 if self._name == "int8" else 7, block, dtype)
        self._on_rounded(name, weight, found)
        return found


def dequantised(
    graph: WeightedGraph, matrix: Matrix, form: WeightsName, block: int | None, read: Callable[[], Sequence[Array]]
) -> ir.Value:
    """Return `matrix` [inputs,outputs] as floats, stored as codes and scales, and for uint4 also as zero points.

    `read` returns them in this order: codes [inputs,outputs], the others [inputs/block,outputs]. Without a `block`,
    each output has one scale.
    """
    dtype, codes = ir.DataType[form.upper()], [matrix.inputs, matrix.outputs]
    each = [matrix.outputs] if block is None else [matrix.inputs // block, matrix.outputs]
    shapes = {matrix.name: (dtype, codes), f"{matrix.name}.scale": (graph.precision.onnx, each)}
    if form == "uint4":
        shapes[f"{matrix.name}.zero"] = (dtype, each)
    waiting: dict[str, Array] = {}

    def tensor(name: str) -> ir.TensorProtocol:
        """Return one of the arrays that a call reads. Each is released when it is written, in any order."""
        if name not in waiting:
            waiting.update(zip(shapes, read(), strict=True))
        array, (of_type, shape) = waiting.pop(name), shapes[name]
        if of_type in (ir.DataType.INT4, ir.DataType.UINT4):
            # Two codes in a byte
            return ir.PackedTensor(packed(array), of_type, shape=ir.Shape(shape))
        return ir.Tensor(array.reshape(shape))

    operands = [graph.stored(name, *described, partial(tensor, name)) for name, described in shapes.items()]
    axes: dict[str, int] = {"axis": 1} if block is None else {"axis": 0, "block_size": block}
    floats: ir.Value = graph.op.DequantizeLinear(*operands, **axes)
    # Not every opset infers them, and dialects need shapes.
    floats.shape, floats.type = operands[0].shape, ir.TensorType(graph.precision.onnx)
    return floats


def block_of(name: str, inputs: int, most: int) -> int:
    """Return the largest block of at most `most` that divides the inputs of the matrix `name`.

    Raises `UsageError`.
    """
    block = largest_block(inputs, most)
    if block is None:
        raise UsageError(
            f"'{name}' has {inputs} inputs, expected a multiple of {min(BLOCK_SIZES)}, the smallest block of 4-bit "
            "weights. Export with --weights int8, or --vision-weights int8 where it is the tower's."
        )
    return block
