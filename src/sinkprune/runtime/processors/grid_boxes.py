"""Boxes of the tokens of a grid on a picture."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from sinkprune.contract.precision import Array

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


@lru_cache(8)
def grid_boxes(area: Box, rows: int, columns: int) -> Array:
    """Return [rows*columns,4] left, top, right, bottom of the equal boxes that tile `area`, in raster order.

    The array is read-only: the next picture of this size has the same.
    """
    left, top, right, bottom = area
    xs, ys = np.linspace(left, right, columns + 1), np.linspace(top, bottom, rows + 1)
    tops, lefts = np.meshgrid(ys[:-1], xs[:-1], indexing="ij")
    bottoms, rights = np.meshgrid(ys[1:], xs[1:], indexing="ij")
    boxes: Array = np.stack([lefts, tops, rights, bottoms], axis=-1).reshape(-1, 4)
    boxes.flags.writeable = False
    return boxes
