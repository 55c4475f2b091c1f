"""Warnings about small samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sinkprune.calibration.evaluation.statistics import (
    FEW_PICTURES,
    FEW_QUESTIONS,
    accuracy_warnings,
    calibration_warnings,
    mean_warnings,
    wilson,
)


def test_enough_questions_are_those_whose_interval_is_ten_points_wide_to_each_side() -> None:
    for right in range(FEW_QUESTIONS + 1):
        low, high = wilson(right, FEW_QUESTIONS)
        assert high - low < 0.2
    low, high = wilson(FEW_QUESTIONS // 4, FEW_QUESTIONS // 2)
    assert high - low > 0.2


def test_ten_questions() -> None:
    # Wilson's interval of 9 in 10 is 59.6 to 98.2 %, and of 5 in 10 23.7 to 76.3 %.
    assert accuracy_warnings(10) == (
        "Small sample: 10 questions. The 95 % interval of an accuracy can reach 31 points to one side. "
        "From 100 questions on it reaches at most 10.",
    )


@pytest.mark.parametrize(
    ("warnings", "enough"),
    [
        (accuracy_warnings, FEW_QUESTIONS),
        (mean_warnings, FEW_PICTURES),
        (calibration_warnings, FEW_PICTURES),
    ],
)
def test_one_sentence_below_the_limit_and_none_from_there_on(
    warnings: Callable[[int], tuple[str, ...]], enough: int
) -> None:
    (alone,) = warnings(1)
    (few,) = warnings(enough - 1)
    assert alone.startswith("Small sample: 1 ") and f"{enough - 1} " in few
    assert str(enough) in alone and "\n" not in alone
    assert warnings(enough) == ()
