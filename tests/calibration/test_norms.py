"""The norm report describes the norms, and finds planted outliers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.calibration.evaluation.report import plant_in_vision, plant_outliers
from sinkprune.calibration.norms import OUTLIER, summarise
from sinkprune.contract.errors import NumericsError

RNG = np.random.default_rng(0)
TOKENS = RNG.normal(size=(3, 200, 16)).astype(np.float32) + 0.5
NORMS = np.linalg.norm(TOKENS, axis=-1)
SALIENCE = RNG.random((3, 200)).astype(np.float32)
SALIENCE /= 2 * SALIENCE.sum(axis=1, keepdims=True)


def test_a_tower_without_outliers_has_that_verdict() -> None:
    report = summarise("tower", 3, NORMS, SALIENCE)
    assert report.outlier_share == np.mean(NORMS / np.median(NORMS, axis=1, keepdims=True) >= OUTLIER) == 0
    assert report.verdict.startswith("No outliers")
    assert report.chance_overlap == pytest.approx(2 / 200)
    assert sum(report.histogram) == report.tokens == 600
    assert len(report.edges) == len(report.histogram) + 1


def test_planted_outliers_are_reported_as_the_papers() -> None:
    _, norms, salience = plant_outliers(TOKENS, NORMS, SALIENCE)
    report = summarise("tower", 3, norms, salience)
    assert report.outlier_share == pytest.approx(2 / 200)
    assert report.largest == pytest.approx(4, rel=0.05)
    # A planted token ties with the most salient of its group.
    assert report.top_overlap >= 0.5
    assert report.verdict.startswith("Outliers as the paper describes them")


def test_large_norms_that_nobody_attends_to_are_not_the_papers() -> None:
    _, norms, _ = plant_outliers(TOKENS, NORMS, SALIENCE)
    salience = np.where(norms > 2 * np.median(norms), 0, SALIENCE)
    report = summarise("tower", 3, norms, salience)
    assert report.top_overlap == report.top_salience_share == 0
    assert report.verdict.startswith("Not the outliers the paper describes")
    assert "do not draw" in report.verdict


def test_large_norms_everywhere_are_no_outliers() -> None:
    norms = np.where(np.arange(200) % 3 == 0, 5.0, 1.0)[None].repeat(3, axis=0)
    report = summarise("tower", 3, norms, norms / norms.sum(axis=1, keepdims=True))
    assert report.outlier_share == pytest.approx(67 / 200)
    assert "too many" in report.verdict


def test_correlation_is_that_of_ranks() -> None:
    norms = np.arange(1, 101, dtype=np.float32)[None]
    assert summarise("tower", 1, norms, norms**3).norm_salience_correlation == pytest.approx(1)
    assert summarise("tower", 1, norms, 1 / norms).norm_salience_correlation == pytest.approx(-1)


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
    assert report.tokens == 50 + 250 + 301
    assert report.outlier_share == pytest.approx(1 / 601)
    assert report.largest == 8
    assert report.top_overlap == 1
    # 1 of 50, 3 of 250, 4 of 301
    assert report.chance_overlap == pytest.approx(np.mean([1 / 50, 3 / 250, 4 / 301]))


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0])
@pytest.mark.parametrize("which", ["norms", "salience"])
def test_what_cannot_be_compared_is_refused(which: str, value: float) -> None:
    given = {"norms": [*NORMS], "salience": [*SALIENCE]}
    given[which][1] = np.full_like(given[which][1], value)
    with pytest.raises(NumericsError, match=f"{which} are not finite, or nothing but zeros"):
        summarise("tower", 3, given["norms"], given["salience"])


def test_groups_of_one_token_have_no_correlation() -> None:
    one = [np.ones(1, np.float32)]
    assert summarise("tower", 1, one, one).norm_salience_correlation == 0
    mixed = summarise("tower", 2, [*one, NORMS[0]], [*one, NORMS[0]])
    assert mixed.norm_salience_correlation == pytest.approx(1)


@pytest.mark.parametrize("name", ["gqa-112", "qwen3-vl"])
def test_planted_outliers_leave_what_else_a_tower_gives(
    name: str, bundle: Callable[..., Path], photo: Image.Image
) -> None:
    """DeepStack's feature sets go with the tokens."""
    pipeline = Pipeline.load(bundle(name), wrap=plant_in_vision)
    answer = pipeline.generate(photo, "What?", max_new_tokens=1)
    assert answer.kept.norms.max() > 3 * np.median(answer.kept.norms)
