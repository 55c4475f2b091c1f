"""Confidence intervals, and the number of questions that a difference needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from sinkprune.contract.checks import counted

Interval = tuple[float, float]
"""The low and the high end of an interval."""
_Z = NormalDist().inv_cdf(0.975)
# The draws of pictures that stay in memory.
_MOST_DRAWN = 10_000_000


@dataclass(frozen=True)
class Mean:
    """A mean over questions."""

    mean: float
    ci95: Interval | None
    """Its 95 % interval; None for a single picture."""


def wilson(right: int, count: int) -> Interval:
    """Return the score interval of `right` successes in `count` trials, 1 or more, as fractions (Wilson 1927).

    Unlike the mean plus or minus 1.96 standard errors, it also holds near 0 and 1, and for few questions.
    """
    share = right / count
    middle = share + _Z**2 / (2 * count)
    reach = _Z * math.sqrt(share * (1 - share) / count + (_Z / (2 * count)) ** 2)
    scale = 1 + _Z**2 / count
    low, high = (middle - reach) / scale, (middle + reach) / scale
    # Rounding could push an end past the share itself, or past 0 and 1.
    return max(0.0, min(low, share)), min(1.0, max(high, share))


def relative_accuracy(right: NDArray[np.bool_], base: NDArray[np.bool_]) -> float | None:
    """Return the accuracy of `right` over that of `base` (bool [Q] each); None if `base` has no right answer."""
    return float(right.sum() / base.sum()) if base.any() else None


class PictureBootstrap:
    """Means and ratios over questions, with percentile intervals over resamples of the pictures (Efron 1979).

    Questions about one picture are not independent, so a picture is drawn with all its questions. All figures share
    the same resamples: 10,000 of them, or fewer of more than 1,000 pictures.
    """

    def __init__(self, pictures: Sequence[str]) -> None:
        """`pictures` names the picture of each question."""
        names, self._picture = np.unique(pictures, return_inverse=True)
        count = len(names)
        resamples = max(2_000, min(10_000, _MOST_DRAWN // count))
        rng = np.random.default_rng(0)
        self._drawn = rng.multinomial(count, np.full(count, 1 / count), size=resamples) if count > 1 else None

    def __call__(self, values: Sequence[float]) -> Mean:
        """Return the mean of one value for each question."""
        mean = float(np.mean(values))
        if self._drawn is None:
            return Mean(mean, None)
        low, high = _ends(self._drawn @ self._sums(values) / (self._drawn @ np.bincount(self._picture)))
        # Rounding could push an end past the mean of equal values.
        return Mean(mean, (min(low, mean), max(high, mean)))

    def relative(self, right: NDArray[np.bool_], base: NDArray[np.bool_]) -> Interval | None:
        """Return the interval of `relative_accuracy`: `right` and `base` (bool [Q] each) are resampled together.

        None for a single picture, and if `base` has no right answer. Resamples without one are left out.
        """
        if self._drawn is None or not base.any():
            return None
        own, others = self._drawn @ self._sums(right), self._drawn @ self._sums(base)
        return _ends(own[others > 0] / others[others > 0])

    def _sums(self, values: Sequence[float] | NDArray[np.bool_]) -> NDArray[np.float64]:
        return np.bincount(self._picture, values).astype(np.float64)


def _ends(resampled: NDArray[np.float64]) -> Interval:
    low, high = np.quantile(resampled, [0.025, 0.975])
    return float(low), float(high)


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
    few = f"Other pictures may give other figures. Measure {FEW_PICTURES} or more."
    return () if pictures >= FEW_PICTURES else (f"Small sample: {counted(pictures, 'picture')}. {few}",)


def calibration_warnings(prompts: int) -> tuple[str, ...]:
    """Return a warning if weights were rounded for too few prompts, one a picture, else nothing."""
    few = (
        "The weights fit the pictures and prompts that they were rounded for, and others less. "
        f"Give {FEW_PICTURES} pictures or more."
    )
    return () if prompts >= FEW_PICTURES else (f"Small sample: {counted(prompts, 'prompt')}. {few}",)


def _reach(questions: int) -> float:
    """Return how far the 95 % interval of an accuracy can reach to one side, in percentage points."""
    ends = ((right / questions, wilson(right, questions)) for right in range(questions + 1))
    return 100 * max(max(share - low, high - share) for share, (low, high) in ends)
