"""The norm report describes the norms, and finds planted outliers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from sinkprune import Pipeline
from sinkprune.calibration.evaluation.replies import plant_in_vision, plant_outliers
from sinkprune.calibration.norms import GAP, MOST, OUTLIER, find_gap, suggest_rho, summarise
from sinkprune.contract.budgets import Budget, Share
from sinkprune.contract.errors import NumericsError

RNG = np.random.default_rng(0)
TOKENS = RNG.normal(size=(3, 200, 16)).astype(np.float32) + 0.5
NORMS = np.linalg.norm(TOKENS, axis=-1)
SALIENCE = RNG.random((3, 200)).astype(np.float32)
SALIENCE /= 2 * SALIENCE.sum(axis=1, keepdims=True)


def test_planted_outliers_are_reported_as_the_papers() -> None:
    report = summarise("tower", 3, NORMS, SALIENCE)
    assert report.outlier_share == np.mean(NORMS / np.median(NORMS, axis=1, keepdims=True) >= OUTLIER) == 0
    assert report.verdict.startswith("No outliers")
    assert report.chance_overlap == pytest.approx(2 / 200)
    assert sum(report.histogram) == report.tokens == 600
    assert len(report.edges) == len(report.histogram) + 1
    _, norms, salience = plant_outliers(TOKENS, NORMS, SALIENCE)
    report = summarise("tower", 3, norms, salience)
    assert (report.outlier_share, report.largest) == (pytest.approx(2 / 200), pytest.approx(4, rel=0.05))
    # A planted token ties with the most salient of its group.
    assert report.top_overlap >= 0.5
    assert report.verdict.startswith("Outliers as the paper describes them")


def test_outliers_are_planted_in_the_least_salient_tokens_only() -> None:
    tokens, norms, salience = plant_outliers(TOKENS, NORMS, SALIENCE)
    for group in range(3):
        planted = np.argsort(SALIENCE[group])[:2]
        others = np.setdiff1d(np.arange(200), planted)
        for before, after in ((TOKENS, tokens), (NORMS, norms), (SALIENCE, salience)):
            assert np.array_equal(before[group, others], after[group, others])
        mean = TOKENS[group].mean(axis=0)
        for token in tokens[group, planted]:
            assert token @ mean == pytest.approx(np.linalg.norm(token) * np.linalg.norm(mean), rel=1e-4)
        assert np.allclose(np.linalg.norm(tokens[group, planted], axis=-1), norms[group, planted], rtol=1e-4)
        assert np.all(salience[group, planted] == SALIENCE[group].max())


def test_pictures_may_differ_in_their_number_of_tokens() -> None:
    norms = [np.linspace(1, 1.5, 50), np.linspace(1, 1.5, 250), np.append(np.ones(300), 8.0)]
    report = summarise("tower", 3, norms, [group / group.sum() for group in norms])
    assert (report.tokens, report.largest, report.top_overlap) == (601, 8, 1)
    assert report.outlier_share == pytest.approx(1 / 601)
    # 1 of 50, 3 of 250, 4 of 301
    assert report.chance_overlap == pytest.approx(np.mean([1 / 50, 3 / 250, 4 / 301]))


@pytest.mark.parametrize("which", ["norms", "salience"])
def test_what_cannot_be_compared_is_refused(which: str) -> None:
    for value in (np.nan, np.inf, 0.0):
        given = {"norms": [*NORMS], "salience": [*SALIENCE]}
        given[which][1] = np.full_like(given[which][1], value)
        with pytest.raises(NumericsError, match=f"{which} are not finite, or nothing but zeros"):
            summarise("tower", 3, **given)


@pytest.mark.parametrize("name", ["gqa-112", "qwen3-vl"])
def test_planted_outliers_leave_what_else_a_tower_gives(
    name: str, bundle: Callable[..., Path], photo: Image.Image
) -> None:
    """DeepStack's feature sets go with the tokens."""
    pipeline = Pipeline.load(bundle(name), wrap=plant_in_vision)
    answer = pipeline.generate(photo, "What?", max_new_tokens=1)
    assert answer.kept.norms.max() > 3 * np.median(answer.kept.norms)


@given(
    *(st.integers(20, 1000), st.integers(1, 50), st.integers(1, 6)),
    *(st.floats(2.5, 40), st.floats(0.01, 300), st.integers(0, 2**32 - 1)),
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
    per_mille, reason = suggest_rho([*norms])
    budget = Budget(Share(1, 9), Share(1, 9), (), outlier_per_mille=per_mille)
    assert budget.resolve(tokens).outliers == planted
    assert f"{groups} of {groups} groups" in reason and f"rho {per_mille / 10:g} %" in reason


@given(st.integers(1, 1000), st.integers(1, 6), st.floats(0.01, 300), st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_without_outliers_none_are_suggested(tokens: int, groups: int, scale: float, seed: int) -> None:
    # No two neighbours of these are far apart, however large the largest are.
    tail = np.sort(np.random.default_rng(seed).uniform(1.0, 1.9, (groups, tokens))) * scale
    per_mille, reason = suggest_rho([*tail])
    assert per_mille == 0
    assert reason.startswith("remove no token") and "keep-outliers" in reason


def test_a_gap_has_its_least_width_and_height_and_few_outliers_above() -> None:
    assert find_gap(np.array([1.0] * 94 + [5.0] * 6)) is None
    assert find_gap(np.array([1.0] * 95 + [5.0] * 5)) == (5, 1.0, 5.0)
    bulk = np.ones(99)
    assert find_gap(np.append(bulk, OUTLIER)) == (1, 1.0, OUTLIER)
    assert find_gap(np.append(bulk, OUTLIER - 0.01)) is None
    bulk[-1] = 1.9
    assert find_gap(np.append(bulk, 1.9 * GAP)) == (1, 1.9, pytest.approx(1.9 * GAP))
    assert find_gap(np.append(bulk, 1.9 * GAP - 0.01)) is None
    # Half of the groups must have one.
    plain, with_one = np.ones(100), np.array([1.0] * 99 + [4.0])
    assert suggest_rho([plain, with_one, plain])[0] == 0
    per_mille, reason = suggest_rho([plain, with_one])
    assert per_mille == 5 and "1 of 2 groups" in reason
