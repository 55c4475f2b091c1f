"""Which patches attend to each other in a windowed vision block, as index tables for its graph."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sinkprune.contract.precision import Array
from sinkprune.runtime.processors.qwen import Grid


@dataclass(frozen=True)
class Windows:
    """Patches in windows, and back. All windows have the same number of slots; those at an edge fill fewer."""

    index: Array
    """[W,slots] int64: the patch in each slot, -1 where it is empty."""
    slot: Array
    """[patches] int64: the slot each patch lies in, counted through all windows."""


def window_index(grid: Grid, merge: int, side: int) -> Windows:
    """Windows of `side` x `side` merged tokens over each frame of `grid`, from its top left corner on.

    A merged token's `merge` x `merge` patches stand together, as `QwenProcessor` gives them.
    """
    rows, columns = grid.h // merge, grid.w // merge
    down, across = -(-rows // side), -(-columns // side)
    units = np.full((grid.t, down * side, across * side), -1)
    units[:, :rows, :columns] = np.arange(grid.t * rows * columns).reshape(grid.t, rows, columns)
    units = units.reshape(grid.t, down, side, across, side).transpose(0, 1, 3, 2, 4).reshape(-1, side * side, 1)
    index = np.where(units < 0, -1, units * merge**2 + np.arange(merge**2)).reshape(-1, (side * merge) ** 2)
    filled = np.flatnonzero(index.ravel() >= 0)
    slot = np.empty(grid.patches, np.int64)
    slot[index.ravel()[filled]] = filled
    return Windows(index.astype(np.int64), slot)
