"""The threshold of a test of evidence that keeps a wanted number of tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from sinkprune.contract.plans import exceeding
from sinkprune.contract.precision import Array

EVERY, NONE = -1.0, 3.4e38
"""Thresholds that every token passes, and none."""


def counts_at(threshold: float, evidence: Sequence[Array], most: Sequence[int]) -> list[int]:
    """Return how many tokens of each request pass `threshold`, by their `evidence`, at most as many as `most`."""
    return [exceeding(own, threshold, limit) for own, limit in zip(evidence, most, strict=True)]


def threshold_for(wanted: float, evidence: Sequence[Array], most: Sequence[int]) -> float:
    """Return the threshold at which the requests keep a number of tokens in all that is nearest to `wanted`.

    `evidence` are the values of each request, fp32. Thresholds are among these values, or `EVERY`. Of two that are
    equally near, the lower one keeps more.
    """
    values = np.concatenate([*evidence, np.array([EVERY], np.float32)])
    # From the threshold that the fewest tokens pass.
    candidates = np.unique(values[values >= EVERY])[::-1].tolist()

    def total(threshold: float) -> int:
        return sum(counts_at(threshold, evidence, most))

    at = min(bisect_left(candidates, wanted, key=total), len(candidates) - 1)
    near = candidates[max(0, at - 1) : at + 1][::-1]
    return float(min(near, key=lambda threshold: abs(total(threshold) - wanted)))
