"""Intervals against values worked out by hand or known from the literature."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinkprune.calibration.evaluation.statistics import Interval, PictureBootstrap, relative_accuracy, wilson


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [
        # z = 1.959964, z^2 = 3.841459. 8 of 10: (0.8 + 0.192073 -+ 1.959964 sqrt(0.016 + 0.0096036)) / 1.3841459
        (8, 10, 0.490162, 0.943318),
        # No right answer: the low end is 0, the high end z^2 / (n + z^2).
        (0, 10, 0.0, 3.841459 / 13.841459),
        (10, 10, 10 / 13.841459, 1.0),
        (0, 1, 0.0, 3.841459 / 4.841459),
        # Newcombe 1998, table I: 81 of 263 and 15 of 148
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
    ],
)
def test_wilson(right: int, count: int, low: float, high: float) -> None:
    assert wilson(right, count) == pytest.approx((low, high), abs=5e-5)
    assert 0.0 <= wilson(right, count)[0] <= right / count <= wilson(right, count)[1] <= 1.0


def test_relative_accuracy() -> None:
    base = np.array([True, True, True, True, False])
    assert relative_accuracy(np.array([True, True, True, False, False]), base) == 0.75
    assert relative_accuracy(base, ~np.ones(5, bool)) is None
    assert relative_accuracy(np.ones(5, bool), base) == 1.25


def paired_bootstrap(right: np.ndarray, base: np.ndarray, seed: int = 0) -> Interval | None:
    """The interval where each question has a picture of its own."""
    return PictureBootstrap([*map(str, range(len(base)))], seed).relative(right, base)


def test_the_bootstrap_is_paired() -> None:
    base = np.arange(200) % 2 == 0
    assert paired_bootstrap(base, base) == (1.0, 1.0)
    low, high = paired_bootstrap(~base, base) or (0.0, 0.0)
    assert low < 0.8 < 1.25 < high


def test_the_bootstrap_equals_all_resamples_of_a_small_set() -> None:
    right, base = np.array([True, False, True, False]), np.array([True, True, False, True])
    ratios = [
        sum(right[i] for i in chosen) / sum(base[i] for i in chosen)
        for chosen in product(range(4), repeat=4)
        if any(base[i] for i in chosen)
    ]
    assert paired_bootstrap(right, base) == pytest.approx(np.quantile(ratios, [0.025, 0.975]), abs=0.02)


def test_the_bootstrap_narrows_with_the_root_of_the_questions() -> None:
    few = np.random.default_rng(0).random((2, 400)) < 0.7
    many = np.tile(few, 16)
    width = [float(np.diff(paired_bootstrap(*pair) or (0, 0))[0]) for pair in (few, many)]
    assert math.isclose(width[0] / width[1], 4, rel_tol=0.05)


def test_the_bootstrap_is_seeded_and_knows_no_ratio_to_nothing() -> None:
    right, base = np.random.default_rng(0).random((2, 50)) < 0.5
    assert paired_bootstrap(right, base) == paired_bootstrap(right, base)
    assert paired_bootstrap(right, base) != paired_bootstrap(right, base, seed=1)
    assert paired_bootstrap(right, np.zeros(50, bool)) is None


def test_pictures_are_resampled_with_all_their_questions() -> None:
    rng = np.random.default_rng(1)
    pictures = [f"picture {number}" for number in range(40) for _ in range(1 + number % 3)]
    own = dict(zip(dict.fromkeys(pictures), rng.normal(size=40), strict=True))
    values = [own[picture] for picture in pictures]
    found = PictureBootstrap(pictures)(values)
    assert found.mean == pytest.approx(np.mean(values))
    groups = [[own[name]] * pictures.count(name) for name in own]
    means = []
    for _ in range(5000):
        drawn = [value for place in rng.integers(40, size=40) for value in groups[place]]
        means.append(sum(drawn) / len(drawn))
    assert found.ci95 == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), abs=0.05)
    # Taken for independent, three questions about a picture would promise too much.
    threefold = PictureBootstrap([name for name in own for _ in range(3)])([own[name] for name in own for _ in "abc"])
    once = PictureBootstrap([*own])([*own.values()])
    assert threefold.ci95 == pytest.approx(once.ci95)


def test_three_questions_about_a_picture_say_as_much_as_one() -> None:
    right, base = np.random.default_rng(3).random((2, 60)) < 0.7
    pictures = [*map(str, range(60))]
    once = PictureBootstrap(pictures).relative(right, base)
    threefold = PictureBootstrap([name for name in pictures for _ in "abc"]).relative(right.repeat(3), base.repeat(3))
    assert once is not None and threefold == pytest.approx(once)
    assert PictureBootstrap(["one"] * 60).relative(right, base) is None


@given(st.floats(0, 1), st.integers(1, 40), st.integers(1, 3))
def test_a_mean_lies_in_its_interval(value: float, pictures: int, questions: int) -> None:
    """Also where rounding is all that differs: resamples add equal values in another order."""
    found = PictureBootstrap([str(number % pictures) for number in range(pictures * questions)])(
        [value] * pictures * questions
    )
    low, high = found.ci95 or (found.mean, found.mean)
    assert low <= found.mean <= high


def test_a_value_that_never_changes_has_no_width_and_one_picture_no_interval() -> None:
    assert PictureBootstrap(["a", "b", "b"])([2.0, 2.0, 2.0]).ci95 == pytest.approx((2.0, 2.0))
    alone = PictureBootstrap(["a", "a"])([1.0, 2.0])
    assert (alone.mean, alone.ci95) == (1.5, None)
