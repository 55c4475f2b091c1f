"""Figures that rest on few pictures, prompts or questions are warned of in one line."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sinkprune.calibration.small_samples import (
    PICTURES,
    PROMPTS,
    QUESTIONS,
    warn_few_pictures,
    warn_few_prompts,
    warn_few_questions,
)


def norms(count: int) -> None:
    warn_few_pictures(count, "norms")


@pytest.mark.parametrize(
    ("warn", "enough", "said"),
    [
        (norms, PICTURES, "norms of 1 picture were measured, and differ"),
        (warn_few_prompts, PROMPTS, "weights were rounded for 1 prompt, and others"),
        (warn_few_questions, QUESTIONS, "after 1 question an accuracy is uncertain by ±"),
    ],
)
def test_a_line_says_how_many_there_were_and_how_many_are_enough(
    warn: Callable[[int], None], enough: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    warn(enough)
    assert capsys.readouterr().err == ""
    warn(1)
    line = capsys.readouterr().err
    assert line.startswith(f"warning: {said}") and line.endswith(f". Use {enough} or more.\n")
    warn(enough - 1)
    assert f"{enough - 1} " in capsys.readouterr().err


def test_the_uncertainty_is_half_of_wilsons_interval(capsys: pytest.CaptureFixture[str]) -> None:
    warn_few_questions(10)
    # Wilson's interval of 5 in 10: from 23.7 to 76.3 %
    assert "after 10 questions an accuracy is uncertain by ±26 points" in capsys.readouterr().err
