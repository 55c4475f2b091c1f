"""Bicubic, antialiased resizing of 8-bit pictures, bit for bit as torchvision resizes uint8 tensors on a CPU.

Columns first, then rows, each rounded to 8 bits, by weights of 16 bits (PyTorch, UpSampleKernel.cpp,
`_compute_index_ranges_int16_weights`). No maintained library without torch gives these bits: Pillow's weights are
finer, which changes some percent of the values, and OpenCV's bicubic does not antialias.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from PIL import Image

from sinkprune.contract.precision import Array

PixelSize = tuple[int, int]
"""Width and height in pixels, as Pillow orders them."""

_MOST_PRECISION = 22
# Rows at a time, so that a step's data stays in the cache
_ROWS = 32
_TRANSPOSE = Image.Transpose.TRANSPOSE


class TorchvisionResize:
    """Resizes pictures of one size (width, height) to another."""

    def __init__(self, size: PixelSize, resized: PixelSize) -> None:
        """Compute the weights from `size` to `resized`."""
        self._columns, self._rows = (_weights(*lengths) for lengths in zip(size, resized, strict=True))

    def __call__(self, picture: Image.Image) -> Array:
        """Return [height,width,3] uint8 of an RGB image."""
        columns = _resized(np.asarray(picture.transpose(_TRANSPOSE)), self._columns)
        return _resized(np.asarray(Image.fromarray(columns).transpose(_TRANSPOSE)), self._rows)


class _Weights(NamedTuple):
    """The shares of old rows in each new row."""

    values: Array
    """[new,old] in a type that holds every sum of weighted pixels exactly."""
    starts: Array
    """[new] the first old row with a share."""
    ends: Array
    """[new] the row after the last with a share."""


def _weights(length: int, resized: int) -> _Weights:
    scale = length / resized
    stretch = max(scale, 1.0)
    centers = scale * (np.arange(resized) + 0.5)
    starts = np.maximum((centers - 2 * stretch + 0.5).astype(np.int64), 0)
    ends = np.minimum((centers + 2 * stretch + 0.5).astype(np.int64), length)
    taps = int((ends - starts).max())
    places = starts[:, None] + np.arange(taps)
    shares = np.where(places < ends[:, None], _cubic((places - centers[:, None] + 0.5) * (1 / stretch)), 0)
    shares /= shares.sum(axis=1, keepdims=True)
    precision, most = 0, shares.max()
    while precision < _MOST_PRECISION and int(0.5 + most * 2 ** (precision + 1)) < 2**15:
        precision += 1
    whole = np.trunc(shares * 2**precision + np.copysign(0.5, shares))
    largest_sum = 255 * np.abs(whole).sum(axis=1).max() + 2 ** (precision - 1)
    values = np.zeros((resized, length + taps), np.float32 if largest_sum < 2**24 else np.float64)
    values[np.arange(resized)[:, None], places] = whole / 2**precision
    return _Weights(values[:, :length], starts, ends)


def _cubic(x: Array) -> Array:
    """Keys' cubic convolution with a = -1/2, term by term as PyTorch writes it."""
    x = np.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _resized(pixels: Array, weights: _Weights) -> Array:
    """Return [new,width,3] uint8 of `pixels` [old,width,3] uint8."""
    values, starts, ends = weights
    new, old = values.shape
    if new == old:
        # All weights would be 0 and 1.
        return pixels
    resized = np.empty((new, *pixels.shape[1:]), np.uint8)
    for start in range(0, new, _ROWS):
        end = min(start + _ROWS, new)
        used = slice(starts[start], ends[end - 1])
        sums = np.tensordot(values[start:end, used], pixels[used].astype(values.dtype), axes=1)
        # The cast rounds towards zero, which is down, because clip removes negative values.
        resized[start:end] = np.clip(sums + values.dtype.type(0.5), 0, 255)
    return resized
