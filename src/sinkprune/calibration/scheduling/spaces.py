"""The space of plans of a bundle that is cut behind some layers, by the attention that was measured."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sinkprune.calibration.scheduling.attention import Attended, lost
from sinkprune.calibration.scheduling.search import Space
from sinkprune.contract.budgets import Share
from sinkprune.contract.manifest import decoder_segments


class Measurements(NamedTuple):
    """What was looked at."""

    attended: Sequence[Attended]
    measured: Sequence[int]
    """The layers (0-based, ascending) whose attention is known: those that the bundle is cut behind."""
    kept: Sequence[int]
    """Rows that each sanitizer keeps of the picture that prices are of."""
    sizes: Sequence[Share]
    tokens: int
    """Visual tokens of that picture."""


def space_of(measurements: Measurements, cut_after: Sequence[int], num_layers: int) -> Space:
    """The plans of a decoder of `num_layers` that is cut behind the layers `cut_after`.

    Where these are not those whose attention is known, a stage goes by that of the nearest before it, and a segment's
    is that of the nearest behind it.
    """
    last = len(measurements.measured) - 1
    segments = decoder_segments(cut_after, num_layers)
    selects = [max(0, bisect_right(measurements.measured, cut) - 1) for cut in cut_after]
    seen = [min(last, bisect_left(measurements.measured, layers[-1])) for layers in segments]
    before, after = lost(measurements.attended, measurements.sizes, selects, seen)
    rows = np.array([size.of(measurements.tokens) for size in measurements.sizes])
    return Space(tuple(map(len, segments)), np.array(measurements.kept), rows, before, after)
