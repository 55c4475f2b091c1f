"""OccamToken's rule, slow and obvious, in numpy: a token stays if its evidence exceeds a threshold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from support.references.reference import largest

Array = np.ndarray[Any, Any]
LEAST = 1e-30
"""What a register without evidence counts as."""


def outliers_of(norms: Array, per_mille: int = 10) -> list[int]:
    """The tokens of largest norm: a picture's register."""
    return largest(norms, max(1, -(-len(norms) * per_mille // 1000)))


def evidence_of_tokens(norms: Array, salience: Array, per_mille: int = 10) -> list[float]:
    """Each token's salience over the mean salience of the outliers; -inf for the outliers."""
    outliers = outliers_of(norms, per_mille)
    register = max(sum(float(salience[i]) for i in outliers) / len(outliers), LEAST)
    return [-np.inf if i in outliers else float(salience[i]) / register for i in range(len(norms))]


def kept_by_evidence(
    tokens: Array, norms: Array, salience: Array, threshold: float, per_mille: int = 10
) -> tuple[Array, list[int]]:
    """The register's row, then every token whose evidence exceeds the threshold, or else the one of most evidence."""
    evidence = evidence_of_tokens(norms, salience, per_mille)
    low = [i for i in range(len(norms)) if np.isfinite(evidence[i])]
    index = [i for i in low if evidence[i] > threshold]
    if low and not index:
        index = [min(low, key=lambda i: (-evidence[i], i))]
    outliers = outliers_of(norms, per_mille)
    register = tokens[outliers].astype(np.float64).mean(axis=0).astype(tokens.dtype)
    return np.concatenate([register[None], tokens[index]]), [outliers[0], *index]


def passing(threshold: float) -> Callable[[Array], int]:
    """How many rows a stage leaves, of the scores [V] of a picture's rows, whose first is the register."""

    def count(scores: Array) -> int:
        return max(1, sum(score / max(scores[0], LEAST) > threshold for score in scores))

    return count
