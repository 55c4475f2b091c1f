"""Rounding of weights to 8 and 4 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from sinkprune.contract.precision import Array

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
