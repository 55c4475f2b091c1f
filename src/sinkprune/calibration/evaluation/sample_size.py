"""Warnings about samples that are too small for their figures."""

from __future__ import annotations

from sinkprune.calibration.evaluation.intervals import wilson
from sinkprune.contract.checks.format_value import counted

FEW_QUESTIONS = 100
"""With as many questions, the 95 % interval of an accuracy reaches at most 10 points to either side."""
FEW_PICTURES = 20
"""With as many pictures, the 95 % interval of a mean reaches at most half a standard deviation to each side."""


def accuracy_warnings(questions: int) -> tuple[str, ...]:
    """Return a warning if `questions` are too few for an accuracy, else nothing."""
    if questions >= FEW_QUESTIONS:
        return ()
    reach, enough = _reach(questions), _reach(FEW_QUESTIONS)
    return (
        f"Small sample: {counted(questions, 'question')}. The 95 % interval of an accuracy can reach {reach:.0f} "
        f"points to one side. From {FEW_QUESTIONS} questions on it reaches at most {enough:.0f}.",
    )


def mean_warnings(pictures: int) -> tuple[str, ...]:
    """Return a warning if `pictures` are too few for means, else nothing."""
    if pictures >= FEW_PICTURES:
        return ()
    return (
        f"Small sample: {counted(pictures, 'picture')}. Other pictures may give other figures. "
        f"Measure {FEW_PICTURES} or more.",
    )


def calibration_warnings(prompts: int) -> tuple[str, ...]:
    """Return a warning if weights were rounded for too few prompts, one a picture, else nothing."""
    if prompts >= FEW_PICTURES:
        return ()
    return (
        f"Small sample: {counted(prompts, 'prompt')}. The weights fit the pictures and prompts that they were "
        f"rounded for, and others less. Give {FEW_PICTURES} pictures or more.",
    )


def _reach(questions: int) -> float:
    """Return how far the 95 % interval of an accuracy can reach to one side, in percentage points."""
    ends = ((right / questions, wilson(right, questions)) for right in range(questions + 1))
    return 100 * max(max(share - low, high - share) for share, (low, high) in ends)
