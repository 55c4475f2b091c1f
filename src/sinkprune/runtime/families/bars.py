"""The tower that leaves out the tokens on the bars of a padded picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from sinkprune.contract.precision import Array
from sinkprune.contract.schedule import VisualLayout


class Bars:
    """Leaves out the tokens whose area has nothing of the picture."""

    def left_out(self, layout: VisualLayout, flops_of: Callable[[int], int]) -> VisualLayout:
        """Return a `layout` of one group without them; `flops_of` returns the tower's FLOPs on so many tokens."""
        left = self._others(layout)
        return replace(
            layout,
            tokens=len(left),
            unpruned_rows=np.arange(len(left)),
            boxes=layout.boxes[left],
            views=(range(len(left)),),
            places=None if layout.places is None else layout.places[:, left],
            tower_flops=flops_of(len(left)),
        )

    def tables(self, layout: VisualLayout) -> dict[str, Array]:
        """Return the tower's input `places` [1,N]: the patches off the bars."""
        return {"places": self._others(layout)[None]}

    @staticmethod
    def _others(layout: VisualLayout) -> Array:
        """Return [N] int64: the tokens whose area has something of the picture."""
        first, last = layout.boxes[:, :2], layout.boxes[:, 2:]
        return np.flatnonzero(((last > 0) & (first < layout.size)).all(axis=1))
