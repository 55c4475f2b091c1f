"""What Pillow's resizing does along an axis, as matrices of small blocks with exact sums.

Pillow resizes one axis, then the other, and rounds to 8 bits after each. A resized value is a sum of weighted pixels,
with whole weights and a shift. Weights are split in two halves, so that all sums of either half are whole numbers
below 2**24, which fp32 adds exactly in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from sinkprune.contract.precision import Array
from sinkprune.runtime.frames import COLUMNS_FIRST, ROWS_FIRST, FrameForm

PRECISION = 22
"""The bits of Pillow's weights. Coarser weights are scaled to as many."""
LOW = 8
"""The bits of the lower halves."""
_MOST_SUM = 2**24


class Axis(NamedTuple):
    """One axis of a view: bars are added, the result is resized, and a part is taken."""

    length: int
    """The pixels of the frame."""
    before: int
    """The pixels of the bar before them."""
    padded: int
    """The pixels with both bars."""
    resized: int
    first: int
    """The first resized pixel that is taken; those before 0 are zero."""
    taken: int
    """The number of pixels taken; those after the resized ones are zero."""


class Weights(NamedTuple):
    """The whole weights of resized pixels."""

    starts: Array
    """[resized] the first old pixel with a weight."""
    values: Array
    """[resized,taps] int64, scaled by 2**`PRECISION`."""


def _bicubic(x: Array) -> Array:
    x, a = np.abs(x), -0.5
    near, far = ((a + 2) * x - (a + 3)) * x * x + 1, (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _bilinear(x: Array) -> Array:
    return np.maximum(1 - np.abs(x), 0)


def _box(x: Array) -> Array:
    return ((x > -0.5) & (x <= 0.5)).astype(np.float64)


def _hamming(x: Array) -> Array:
    x = np.abs(x)
    return np.where(x < 1, np.sinc(x) * (0.54 + 0.46 * np.cos(np.pi * x)), 0)


def _lanczos(x: Array) -> Array:
    return np.where((x >= -3) & (x < 3), np.sinc(x) * np.sinc(x / 3), 0)


_Filter = Callable[[Array], Array]
_FILTERS: dict[int, tuple[_Filter, float]] = {
    Image.Resampling.BOX: (_box, 0.5),
    Image.Resampling.BILINEAR: (_bilinear, 1.0),
    Image.Resampling.HAMMING: (_hamming, 1.0),
    Image.Resampling.BICUBIC: (_bicubic, 2.0),
    Image.Resampling.LANCZOS: (_lanczos, 3.0),
}
"""Pillow's filters with their radius, but for the nearest neighbour, which weighs nothing."""


def pillow_weights(length: int, resized: int, resample: int) -> Weights | None:
    """Return the weights of `Image.resize` (Pillow, Resample.c); None for a filter that weighs nothing."""
    if resample not in _FILTERS:
        return None
    kernel, radius = _FILTERS[resample]
    scale = length / resized
    stretch = max(scale, 1.0)
    centers = (np.arange(resized) + 0.5) * scale
    starts = np.maximum((centers - radius * stretch + 0.5).astype(np.int64), 0)
    ends = np.minimum((centers + radius * stretch + 0.5).astype(np.int64), length)
    places = starts[:, None] + np.arange(int((ends - starts).max()))
    shares = np.where(places < ends[:, None], kernel((places - centers[:, None] + 0.5) * (1 / stretch)), 0)
    # One after the other, as Pillow adds them.
    shares /= shares.cumsum(axis=1)[:, -1:]
    return Weights(starts, np.trunc(shares * 2**PRECISION + np.copysign(0.5, shares)).astype(np.int64))


_SAMPLES = 32


def rows_first(size: tuple[int, int], resized: tuple[int, int], resample: int) -> bool | None:
    """Return whether the installed Pillow resizes rows before columns; None if neither order gives its pixels.

    Pillow 13 chooses by the sizes, and earlier versions always begin with columns. So noise is resized, and some of
    its pixels are compared.
    """
    draw = np.random.default_rng(0)
    noise = np.resize(draw.integers(0, 256, 65_521, np.uint8), (size[1], size[0], 3))
    expected = np.asarray(Image.fromarray(noise).resize(resized, Image.Resampling(resample)))
    weights = [pillow_weights(*lengths, resample) for lengths in zip(size, resized, strict=True)]
    across, down = (draw.choice(count, min(count, _SAMPLES), replace=False) for count in resized)

    def along(pixels: Array, axis: int, chosen: Array) -> Array:
        found = weights[1 - axis]
        return pixels if found is None else _resized(pixels, axis, found, chosen)

    sampled = expected[down][:, across]
    if np.array_equal(along(along(noise, 1, across), 0, down), sampled):
        return False
    return True if np.array_equal(along(along(noise, 0, down), 1, across), sampled) else None


def _resized(pixels: Array, axis: int, weights: Weights, chosen: Array) -> Array:
    """Return the `chosen` resized pixels along an axis."""
    lines = np.moveaxis(pixels, axis, 0)
    sums = []
    for start, values in zip(weights.starts[chosen], weights.values[chosen], strict=True):
        read = lines[start : start + len(values)]
        sums.append(np.tensordot(values[: len(read)], read.astype(np.int64), 1))
    whole = np.stack(sums, axis) + (1 << PRECISION - 1) >> PRECISION
    return whole.clip(0, 255).astype(np.uint8)


class Blocks(NamedTuple):
    """The weights of all views along an axis, `block` resized pixels at a time, as the graphs take them."""

    place: Array
    """[views,blocks,window] int64: the pixels that a block reads."""
    weight: Array
    """[views,blocks,2*block,window] fp32: upper halves, then lower halves by 2**`LOW`."""
    bias: Array
    """[views,blocks,2*block,1,3] fp32: what bars add, and the half that rounds."""


def blocks(views: Sequence[Axis], resample: int, block: int, bar: Sequence[int]) -> Blocks | None:
    """Return the blocks of `views`, of one size, by a filter of Pillow; their bars have the colour `bar`.

    None for the nearest neighbour, and if there are so many weights that a sum would not be exact.
    """
    parts = []
    for view in views:
        weights = pillow_weights(view.padded, view.resized, resample)
        if weights is None:
            return None
        parts.append(_taken(view, weights))
    starts, values = (np.stack(part).reshape(len(views), -1, block, *part[0].shape[1:]) for part in _aligned(parts))
    taps = values.shape[-1]
    used = values.any(axis=-1)
    first = np.where(used, starts, np.iinfo(np.int64).max).min(axis=2)
    last = np.where(used, starts + taps, 0).max(axis=2)
    first = np.where(last > 0, first, 0)
    window = max(1, int((last - first).max()))
    # Places in the padded picture, then in the frame.
    spread = np.zeros((*values.shape[:3], window + taps), np.int64)
    offsets = np.where(used, starts - first[..., None], 0)
    np.put_along_axis(spread, offsets[..., None] + np.arange(taps), values, axis=-1)
    spread = spread[..., :window]
    before = np.array([view.before for view in views])[:, None, None]
    index = first[..., None] + np.arange(window) - before
    length = views[0].length
    outside = (index < 0) | (index >= length)
    high, low = np.divmod(spread + (1 << LOW - 1), 1 << LOW)
    low -= 1 << LOW - 1
    halves = np.concatenate([high, low], axis=2)
    if 255 * np.abs(halves).sum(axis=-1).max() + (1 << PRECISION - LOW - 1) >= _MOST_SUM:
        return None
    bias = np.einsum("vbow,c->vboc", np.where(outside[:, :, None], halves, 0), np.array(bar, np.int64))
    bias[:, :, :block] += 1 << PRECISION - LOW - 1
    scale = np.repeat(np.array([1, 2**-LOW], np.float32), block)
    weight = np.where(outside[:, :, None], 0, halves) * scale[:, None]
    return Blocks(
        index.clip(0, length - 1), weight.astype(np.float32), (bias * scale[:, None]).astype(np.float32)[..., None, :]
    )


def _taken(view: Axis, weights: Weights) -> tuple[Array, Array]:
    """Return the starts and the values of the pixels that a view takes; zeros beside the resized ones."""
    places = np.arange(view.first, view.first + view.taken)
    inside = (places >= 0) & (places < view.resized)
    places = places.clip(0, view.resized - 1)
    return weights.starts[places], np.where(inside[:, None], weights.values[places], 0)


def _aligned(parts: Sequence[tuple[Array, Array]]) -> tuple[list[Array], list[Array]]:
    """Return all starts, and all values with as many taps."""
    most = max(values.shape[1] for _, values in parts)
    wide = [np.pad(values, ((0, 0), (0, most - values.shape[1]))) for _, values in parts]
    return [starts for starts, _ in parts], wide


class PillowPlan(NamedTuple):
    """A picture with bars is resized as by Pillow, and squares are taken of it.

    Each view of rows with each view of columns is one square, in raster order.
    """

    columns: tuple[Axis, ...]
    rows: tuple[Axis, ...]
    resample: int
    """One of Pillow's filters."""
    bar: tuple[int, ...] = (0, 0, 0)
    """The colour of bars before the picture is resized."""

    def weights(self, form: FrameForm) -> tuple[str, dict[str, Array]] | None:
        """Return the name of the graph and its inputs that depend on the plan; None where only the host is exact."""
        (columns, *_), (rows, *_) = self.columns, self.rows
        order = rows_first((columns.padded, rows.padded), (columns.resized, rows.resized), self.resample)
        inputs = dict[str, Array]()
        for name, axes in (("columns", self.columns), ("rows", self.rows)):
            found = blocks(axes, self.resample, form.block, self.bar)
            if found is None or order is None:
                return None
            inputs |= {f"{name}_{part}": array for part, array in found._asdict().items()}
        if form.masked:
            down, across = (_inside(axis) for axis in (rows, columns))
            inputs["inside"] = (down[:, None] & across).astype(form.constants["table"].dtype)
        return ROWS_FIRST if order else COLUMNS_FIRST, inputs


def _inside(axis: Axis) -> Array:
    places = axis.first + np.arange(axis.taken)
    return (places >= 0) & (places < axis.resized)


Neighbours = Callable[[int, int], tuple[Array, Array, Array]]
"""Returns the near and the far old pixel of each new one and the far one's share, for an old and a new length."""


class BilinearPlan(NamedTuple):
    """A picture is resized between two pixels each, in floats and rows first, within a black square."""

    columns: Axis
    rows: Axis
    neighbours: Neighbours

    def weights(self, form: FrameForm) -> tuple[str, dict[str, Array]]:
        """Return the name of the graph and its inputs that depend on the plan."""
        inputs = dict[str, Array]()
        for name, axis in (("columns", self.columns), ("rows", self.rows)):
            near, far, share = self.neighbours(axis.length, axis.resized)
            ends = (near, far, np.float32(1) - share, share)
            place = slice(-axis.first, axis.resized - axis.first)
            for part, values in zip(("near", "far", "near_share", "far_share"), ends, strict=True):
                inputs[f"{name}_{part}"] = whole = np.zeros(axis.taken, values.dtype)
                whole[place] = values
        return COLUMNS_FIRST, inputs
