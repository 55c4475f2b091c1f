"""Next-token choice: greedy, or temperature and top-p with a seed."""

from __future__ import annotations

import math
import sys

import numpy as np

from sinkprune.contract.checks.ranges import RealNumber, WholeNumber
from sinkprune.contract.errors import NumericsError
from sinkprune.contract.precision import Array

TEMPERATURE = RealNumber("temperature", 0.0, sys.float_info.max, "0 (greedy) or a larger finite number")
TOP_P = RealNumber("top-p", math.nextafter(0.0, 1.0), 1.0, "more than 0 and at most 1")
# As many bits as numpy's generator keeps of one
SEED = WholeNumber("seed", 0, 2**128 - 1)


class Sampler:
    """`temperature` 0 is greedy; ties go to the lower token id. The same seed gives the same tokens."""

    def __init__(self, temperature: float = 0.0, top_p: float = 1.0, seed: int | None = None) -> None:
        """Raises `UsageError` for what is not of `TEMPERATURE`, `TOP_P` or `SEED`."""
        self._temperature, self._top_p = TEMPERATURE.check(temperature), TOP_P.check(top_p)
        seed = None if seed is None else SEED.check(seed)
        self._generator = np.random.default_rng(seed)

    def __call__(self, logits: Array) -> int:
        """A token id from logits [vocab]; raises `NumericsError` if they are not finite."""
        if not np.isfinite(logits).all():
            raise NumericsError(
                "the model gave logits that are not finite. If the bundle is fp16, its values may exceed that type; "
                "export it with --precision fp32. openvino-gpu computes in fp16 unless --compute is fp32."
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
