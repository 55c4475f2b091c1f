"""Next-token choice: greedy, or temperature and top-p with a seed."""

from __future__ import annotations

from numbers import Integral, Real

import numpy as np

from sinkprune.contract.errors import NumericsError, UsageError
from sinkprune.contract.precision import Array


class Sampler:
    """`temperature` 0 is greedy; ties go to the lower token id. The same seed gives the same tokens."""

    def __init__(self, temperature: float = 0.0, top_p: float = 1.0, seed: int | None = None) -> None:
        if not _is_real(temperature) or not temperature >= 0.0:
            raise UsageError(f"temperature is {temperature}, expected 0 (greedy) or more.")
        if not _is_real(top_p) or not 0.0 < top_p <= 1.0:
            raise UsageError(f"top-p is {top_p}, expected more than 0 and at most 1.")
        if seed is not None and not (isinstance(seed, Integral) and seed >= 0):
            raise UsageError(f"seed is {seed}, expected 0 or more.")
        self._temperature, self._top_p = temperature, top_p
        self._generator = np.random.default_rng(seed)

    def __call__(self, logits: Array) -> int:
        """A token id from logits [vocab]; raises `NumericsError` if they are not finite."""
        if not np.isfinite(logits).all():
            raise NumericsError(
                "the model gave logits that are not finite. If the bundle is fp16, its values may exceed that type; "
                "export it with --precision fp32."
            )
        if self._temperature == 0.0:
            return int(np.argmax(logits))
        below_best = logits.astype(np.float64) - logits.max()
        # At the lowest temperatures all but the best fall to exp(-inf) = 0.
        with np.errstate(over="ignore"):
            probabilities = np.exp(below_best / self._temperature)
        probabilities /= probabilities.sum()
        order = np.argsort(-probabilities, kind="stable")
        # The smallest set whose probability reaches top_p; never empty.
        before = np.cumsum(probabilities[order]) - probabilities[order]
        nucleus = order[before < self._top_p]
        weights = probabilities[nucleus] / probabilities[nucleus].sum()
        return int(self._generator.choice(nucleus, p=weights))


def _is_real(value: object) -> bool:
    """Whether `value` is a number: numpy's are, and mypy does not know that floats are."""
    return isinstance(value, Real)
