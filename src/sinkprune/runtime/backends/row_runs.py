"""Rows of several tensors in a new order, as runs of adjacent rows that are copied at once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np

from sinkprune.contract.precision import Array


def row_runs(lengths: Sequence[int], order: Array) -> Iterator[tuple[int, int, int, int]]:
    """Yield the runs of `order` [S] int64, which numbers rows through tensors of these `lengths`.

    A run is rows that are adjacent in their tensor and in the new order: the number of the tensor, their first row in
    it, how many they are, and their first row in the new order.
    """
    starts = [0, *accumulate(lengths)]
    breaks = np.flatnonzero(order[1:] != order[:-1] + 1) + 1
    for place, end in pairwise([0, *breaks.tolist(), len(order)]):
        while place < end:
            row = int(order[place])
            part = bisect_right(starts, row) - 1
            length = min(end - place, starts[part + 1] - row)
            yield part, row - starts[part], length, place
            place += length


def joined(parts: Sequence[Array], order: Array) -> Array:
    """Return [1,S,d]: rows of the host arrays `parts` [...,d], numbered through all parts, in `order` [S] int64."""
    rows = [part.reshape(-1, part.shape[-1]) for part in parts]
    together = np.empty((1, len(order), rows[0].shape[1]), rows[0].dtype)
    for part, first, count, place in row_runs([len(part) for part in rows], order):
        together[0, place : place + count] = rows[part][first : first + count]
    return together
