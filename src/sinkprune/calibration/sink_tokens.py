"""Which tokens of a picture count as sink tokens: those of largest norm (method.md section 1, step 1)."""

from __future__ import annotations

import numpy as np

from sinkprune.contract.budgets import Budget
from sinkprune.contract.precision import Array

OUTLIER_PER_MILLE = Budget.outlier_per_mille
"""rho: how many tokens of a group count as sink tokens, rounded up."""


def sink_tokens(norms: Array) -> Array:
    """[G,N] bool: of `norms` [G,N] the ceil(rho*N) largest of each group, ties to the earlier token."""
    return largest(norms, -(-norms.shape[1] * OUTLIER_PER_MILLE // 1000))


def largest(values: Array, count: int) -> Array:
    """[G,N] bool: the `count` largest of each row, ties to the earlier."""
    marked = np.zeros(values.shape, bool)
    np.put_along_axis(marked, np.argsort(-values, axis=1, kind="stable")[:, :count], True, axis=1)
    return marked
