"""The suggested rho: planted outliers are found to the token, and where there are none, none are suggested."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkprune.calibration.norms import GAP, MOST, OUTLIER, find_gap, suggest_rho
from sinkprune.contract.budgets import Budget, Share


@given(
    st.integers(20, 1000),
    st.integers(1, 50),
    st.integers(1, 6),
    st.floats(2.5, 40),
    st.floats(0.01, 300),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=100, deadline=None)
def test_a_budget_with_the_suggested_rho_takes_out_what_was_planted(
    tokens: int, planted: int, groups: int, times: float, scale: float, seed: int
) -> None:
    planted = min(planted, int(MOST * tokens))
    random = np.random.default_rng(seed)
    norms = random.uniform(0.6, 1.6, (groups, tokens)) * scale
    for group in norms:
        group[random.choice(tokens, planted, replace=False)] = 1.6 * scale * times * random.uniform(1, 3, planted)
    found = suggest_rho([*norms])
    budget = Budget(Share(1, 9), Share(1, 9), (), outlier_per_mille=found.per_mille)
    assert budget.resolve(tokens).outliers == planted
    assert f"{groups} of {groups} groups" in found.reason and f"rho {found.per_mille / 10:g} %" in found.reason


@given(st.integers(1, 1000), st.integers(1, 6), st.floats(0.01, 300), st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_without_outliers_none_are_suggested(tokens: int, groups: int, scale: float, seed: int) -> None:
    # No two neighbours of these are far apart, however large the largest are.
    tail = np.sort(np.random.default_rng(seed).uniform(1.0, 1.9, (groups, tokens))) * scale
    found = suggest_rho([*tail])
    assert found.per_mille == 0
    assert found.reason.startswith("remove no token") and "keep-outliers" in found.reason


def test_a_tail_without_a_gap_has_no_outliers() -> None:
    assert find_gap(np.concatenate([np.ones(400), np.geomspace(1, 9, 100)])) is None


def test_the_lowest_gap_counts() -> None:
    norms = np.concatenate([np.linspace(0.8, 1.2, 97), [3.0, 3.1, 9.0]])
    found = find_gap(norms)
    assert found is not None
    assert found.outliers == 3
    assert (found.below, found.above) == pytest.approx((1.2 / np.median(norms), 3 / np.median(norms)))


def test_more_than_a_twentieth_are_no_outliers() -> None:
    assert find_gap(np.array([1.0] * 94 + [5.0] * 6)) is None
    assert find_gap(np.array([1.0] * 95 + [5.0] * 5)) == (5, 1.0, 5.0)


def test_a_gap_has_its_least_width_and_height() -> None:
    bulk = np.ones(99)
    assert find_gap(np.append(bulk, OUTLIER)) == (1, 1.0, OUTLIER)
    assert find_gap(np.append(bulk, OUTLIER - 0.01)) is None
    bulk[-1] = 1.9
    assert find_gap(np.append(bulk, 1.9 * GAP)) == (1, 1.9, pytest.approx(1.9 * GAP))
    assert find_gap(np.append(bulk, 1.9 * GAP - 0.01)) is None


def test_a_group_of_one_token_has_no_gap() -> None:
    assert find_gap(np.ones(1)) is None


def test_half_of_the_groups_must_have_one() -> None:
    plain, with_one = np.ones(100), np.array([1.0] * 99 + [4.0])
    assert suggest_rho([plain, with_one, plain]).per_mille == 0
    assert suggest_rho([plain, with_one]).per_mille == 5
    assert "1 of 2 groups" in suggest_rho([plain, with_one]).reason


def test_ten_per_mille_are_what_budgets_take_as_they_are() -> None:
    assert "(budgets as they are)" in suggest_rho([np.array([1.0] * 99 + [4.0])]).reason
