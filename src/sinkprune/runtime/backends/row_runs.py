"""Rows of several tensors in a new order, as runs of adjacent rows that are copied at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from sinkprune.contract.precision import Array


class RowRun(NamedTuple):
    """Rows that are adjacent in their tensor and in the new order."""

    part: int
    """The tensor they come from."""
    first: int
    """Their first row in it."""
    length: int
    place: int
    """Their first row in the new order."""


def row_runs(lengths: Sequence[int], order: Array) -> list[RowRun]:
    """Return the runs of `order` [S] int64, which numbers rows through tensors of these `lengths`."""
    starts = np.cumsum([0, *lengths])
    part = np.searchsorted(starts, order, side="right") - 1
    breaks = np.flatnonzero((np.diff(order) != 1) | (np.diff(part) != 0)) + 1
    places = [0, *breaks.tolist(), len(order)]
    return [
        RowRun(int(part[place]), int(order[place] - starts[part[place]]), end - place, place)
        for place, end in pairwise(places)
        if end > place
    ]


def joined(parts: Sequence[Array], order: Array) -> Array:
    """Return [1,S,d]: rows of the host arrays `parts` [...,d], numbered through all parts, in `order` [S] int64."""
    rows = [part.reshape(-1, part.shape[-1]) for part in parts]
    together = np.empty((1, len(order), rows[0].shape[1]), rows[0].dtype)
    for part, first, count, place in row_runs([len(part) for part in rows], order):
        together[0, place : place + count] = rows[part][first : first + count]
    return together
