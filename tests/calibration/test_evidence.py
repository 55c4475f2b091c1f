"""The threshold that keeps a wanted number of tokens, compared with trying every threshold."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkprune.calibration.evidence.measuring import EVERY, NONE, counts_at, threshold_for

Array = np.ndarray[Any, Any]
VALUES = st.one_of(
    st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0, float(np.finfo(np.float32).max), -np.inf]),
    st.floats(0, 4, width=32),
)


def count_by_hand(threshold: float, evidence: list[Array], most: list[int]) -> int:
    """Every request keeps what exceeds the threshold, one at least, and no more than its limit."""
    total = 0
    for own, limit in zip(evidence, most, strict=True):
        passed = sum(1 for value in own.tolist() if value > threshold)
        total += min(limit, max(1, passed))
    return total


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.lists(st.lists(VALUES, min_size=1, max_size=12), min_size=1, max_size=6), st.floats(-3, 80))
def test_no_threshold_is_nearer(drawn: list[list[float]], wanted: float) -> None:
    evidence = [np.array(own, np.float32) for own in drawn]
    most = [max(1, int(np.isfinite(own).sum())) for own in evidence]
    found = threshold_for(wanted, evidence, most)
    every = [EVERY, *sorted({float(value) for own in evidence for value in own if value >= EVERY})]
    best = min(abs(count_by_hand(threshold, evidence, most) - wanted) for threshold in every)
    assert abs(count_by_hand(found, evidence, most) - wanted) == best
    assert sum(counts_at(found, evidence, most)) == count_by_hand(found, evidence, most)


def test_a_threshold_is_met_to_a_token_without_ties() -> None:
    draw = np.random.default_rng(0)
    evidence = [draw.random(200).astype(np.float32) for _ in range(20)]
    most = [200] * 20
    for wanted in (20, 21, 500, 3999, 4000):
        assert sum(counts_at(threshold_for(wanted, evidence, most), evidence, most)) == wanted


def test_the_ends() -> None:
    evidence = [np.array([0.0, 0.0, 5.0], np.float32)]
    assert threshold_for(3, evidence, [3]) == EVERY
    assert counts_at(EVERY, evidence, [3]) == [3]
    # One at least, although none exceeds the threshold.
    assert counts_at(NONE, evidence, [3]) == [1]
    assert counts_at(threshold_for(0, evidence, [3]), evidence, [3]) == [1]
