"""Weights rounded to whole numbers with scales, to the nearest: symmetric, or with zero points."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from sinkprune.contract.precision import Array

# As many values fit a core's second cache.
_CHUNK = 1 << 17


class Rounded(NamedTuple):
    """A matrix [outputs,inputs] as codes and scales; value (o,i) is codes[o,i] * scales[o, i // block]."""

    codes: Array
    """[outputs,inputs] int8, from -most to most."""
    scales: Array
    """[outputs,blocks] floats above 0."""

    def values(self) -> Array:
        """The matrix [outputs,inputs] fp32 that is meant."""
        return _scaled(self.codes.astype(np.float32), self.scales)


class RoundedFromZero(NamedTuple):
    """A matrix [outputs,inputs] as codes, scales and zero points; value (o,i) is (codes[o,i] - zeros[o,b]) *
    scales[o,b] with b = i // block."""

    codes: Array
    """[outputs,inputs] uint8, from 0 to most."""
    scales: Array
    """[outputs,blocks] floats above 0."""
    zeros: Array
    """[outputs,blocks] uint8: the codes that stand for zero."""

    def values(self) -> Array:
        """The matrix [outputs,inputs] fp32 that is meant."""
        codes, block = self.codes.astype(np.float32), self.codes.shape[1] // self.zeros.shape[1]
        codes.reshape(*self.zeros.shape, block)[...] -= self.zeros[..., None]
        return _scaled(codes, self.scales)


class Rounding(Protocol):
    """A rule by which matrices are rounded."""

    def __call__(self, name: str, weight: Array, most: int, block: int, dtype: np.dtype[Any]) -> Rounded:
        """The matrix `name` as `rounded` gives it, or nearer by another measure."""


def to_nearest(name: str, weight: Array, most: int, block: int, dtype: np.dtype[Any]) -> Rounded:
    """The rule that is the same for all matrices: `rounded`."""
    return rounded(weight, most, block, dtype)


def rounded(weight: Array, most: int, block: int, dtype: np.dtype[Any]) -> Rounded:
    """`weight` [outputs,inputs] in codes up to `most` (127 for int8, 7 for int4), `block` inputs to a scale.

    Scales are of `dtype`, and codes are rounded by the scales as they are stored. The largest value of each block is
    met exactly, up to its scale's rounding. `block` divides the inputs.
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
    return Rounded(codes, scales)


def rounded_from_zero(weight: Array, most: int, block: int, dtype: np.dtype[Any]) -> RoundedFromZero:
    """`weight` [outputs,inputs] in codes from 0 to `most` (15 for uint4), `block` inputs to a scale and a zero point.

    Scales are of `dtype`, and codes are rounded by the scales as they are stored. A block's range is made to reach
    zero, which is met exactly. `block` divides the inputs.
    """
    outputs, inputs = weight.shape
    codes, scales = np.empty((outputs, inputs), np.uint8), np.empty((outputs, inputs // block), dtype)
    zeros = np.empty(scales.shape, np.uint8)
    for rows, blocks in _in_chunks(weight, block):
        low, high = np.minimum(blocks.min(axis=-1), 0), np.maximum(blocks.max(axis=-1), 0)
        # Each divided before they are added up: the sum of two large ones may be none.
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
    return RoundedFromZero(codes, scales, zeros)


def _in_chunks(weight: Array, block: int) -> Iterator[tuple[slice, Array]]:
    """Some rows of `weight` [outputs,inputs] after the other: which, and a copy of them [rows,blocks,block] fp32."""
    outputs, inputs = weight.shape
    step = max(1, _CHUNK // inputs)
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        yield rows, weight[rows].astype(np.float32).reshape(-1, inputs // block, block)


def _scaled(values: Array, scales: Array) -> Array:
    """`values` [outputs,inputs] fp32 times the scales [outputs,blocks] of their blocks, in place."""
    outputs, blocks = scales.shape
    values.reshape(outputs, blocks, -1)[...] *= scales.astype(np.float32)[..., None]
    return values


def stored_scales(scales: Array, dtype: np.dtype[Any]) -> Array:
    """`scales` as they can be stored: finite, and never 0, which no engine divides by."""
    limits = np.finfo(dtype)
    stored: Array = np.clip(scales, limits.tiny, limits.max).astype(dtype)
    return stored


def packed(codes: Array) -> Array:
    """Two 4-bit `codes`, of any integers from -8 to 15, in each byte [n] uint8, the first in the low half.

    Codes are taken line by line; an odd last one has zeros beside it (onnx.proto3, `TensorProto.INT4`).
    """
    flat = np.ascontiguousarray(codes).view(np.uint8).ravel()
    if flat.size % 2:
        flat = np.append(flat, np.uint8(0))
    low, high = flat[0::2] & 15, flat[1::2] << 4
    both: Array = low | high
    return both
