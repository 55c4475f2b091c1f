"""Weights rounded to whole numbers with scales: symmetric, to the nearest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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


Rounding = Callable[[str, Array, int, int, np.dtype[Any]], Rounded]
"""A rule: takes the name of a matrix, and then what `rounded` takes."""


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
    step = max(1, _CHUNK // inputs)
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        blocks = weight[rows].astype(np.float32).reshape(-1, inputs // block, block)
        largest = np.maximum(blocks.max(axis=-1), -blocks.min(axis=-1))
        scale = stored_scales(largest / np.float32(most), dtype)
        scales[rows] = scale
        blocks /= scale.astype(np.float32)[..., None]
        np.rint(blocks, out=blocks)
        np.clip(blocks, -most, most, out=blocks)
        codes[rows] = blocks.reshape(-1, inputs)
    return Rounded(codes, scales)


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
