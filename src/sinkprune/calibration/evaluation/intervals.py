"""95 % intervals of accuracies, of their ratios, and of means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Interval = tuple[float, float]
"""The low and the high end of an interval."""
_Z = NormalDist().inv_cdf(0.975)
_RESAMPLES = 10_000
# Fewer, because all means share one draw, which stays in memory.
_PICTURE_RESAMPLES = 2_000


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


def paired_bootstrap(right: NDArray[np.bool_], base: NDArray[np.bool_], seed: int = 0) -> Interval | None:
    """Return the percentile interval of `relative_accuracy` over 10,000 resamples of the questions (Efron 1979).

    `right` and `base` (bool [Q] each) answer the same questions, and are resampled together. Questions about one
    picture count as independent. None if `base` has no right answer; resamples without one are left out.
    """
    if not base.any():
        return None
    # Resampling questions means drawing the counts of the four pairs of outcomes.
    outcomes = np.array([(right & base).sum(), (right & ~base).sum(), (~right & base).sum(), (~right & ~base).sum()])
    drawn = np.random.default_rng(seed).multinomial(len(base), outcomes / len(base), size=_RESAMPLES)
    drawn = drawn[drawn[:, 0] + drawn[:, 2] > 0]
    ratios = (drawn[:, 0] + drawn[:, 1]) / (drawn[:, 0] + drawn[:, 2])
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)


class PictureBootstrap:
    """Means over questions, with percentile intervals over 2,000 resamples of the pictures (Efron 1979).

    Questions about one picture are not independent, so a picture is drawn with all its questions. All means share the
    same resamples.
    """

    def __init__(self, pictures: Sequence[str], seed: int = 0) -> None:
        """`pictures` names the picture of each question."""
        names, self._picture = np.unique(pictures, return_inverse=True)
        count = len(names)
        rng = np.random.default_rng(seed)
        self._drawn = (
            rng.multinomial(count, np.full(count, 1 / count), size=_PICTURE_RESAMPLES) if count > 1 else None
        )

    def __call__(self, values: Sequence[float]) -> Mean:
        """Return the mean of one value for each question."""
        mean = float(np.mean(values))
        if self._drawn is None:
            return Mean(mean, None)
        sums, counts = np.bincount(self._picture, values), np.bincount(self._picture)
        low, high = np.quantile((self._drawn @ sums) / (self._drawn @ counts), [0.025, 0.975])
        return Mean(mean, (float(low), float(high)))
