"""The sink tokens of a picture: the tokens of largest norm (method.md section 1, step 1)."""

from __future__ import annotations

import numpy as np

from sinkprune.contract.budgets import Budget
from sinkprune.contract.precision import Array

OUTLIER_PER_MILLE = Budget.outlier_per_mille
"""rho: the sink tokens in 1000 tokens of a group, rounded up."""


def sink_tokens(norms: Array) -> Array:
    """Return [G,N] bool: the ceil(rho*N) largest `norms` [G,N] of each group, ties to the earlier token."""
    return mark_largest(norms, -(-norms.shape[1] * OUTLIER_PER_MILLE // 1000))


def mark_largest(values: Array, count: int) -> Array:
    """Return [G,N] bool: the `count` largest of each row, ties to the earlier."""
    marked = np.zeros(values.shape, bool)
    np.put_along_axis(marked, np.argsort(-values, axis=1, kind="stable")[:, :count], True, axis=1)
    return marked
