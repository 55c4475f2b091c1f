"""Random outputs of a vision tower: tokens, norms and salience, with ties, duplicates, zeros and outliers."""

from __future__ import annotations

from itertools import product

import numpy as np

from sinkprune.contract.precision import DTYPES, Array

KINDS = ("random", "tied", "duplicated", "zero rows", "all zero", "outliers")
LARGE = {"fp32": 1e25, "fp16": 2e3}
"""Factors with which a squared norm exceeds the type's maximum."""


def token_features(kind: str, groups: int, n: int = 576, d: int = 48, precision: str = "fp32") -> dict[str, Array]:
    """Return tokens [groups,n,d], norms and salience [groups,n] of a kind of `KINDS`, or of `large norms`."""
    rng = np.random.default_rng(7)
    tokens, salience = rng.normal(size=(groups, n, d)), rng.random((groups, n))
    norms = None
    if kind == "tied":
        tokens = exact_rows(rng, groups, n, d)
        norms, salience = rng.integers(1, 4, (groups, n)), rng.integers(0, 3, (groups, n)) / 4
    if kind == "duplicated":
        tokens = tokens[:, rng.integers(0, n // 2, n)]
    if kind == "zero rows":
        tokens[:, rng.choice(n, n // 3, replace=False)] = 0
    if kind == "all zero":
        tokens[:] = 0
    if kind == "outliers":
        tokens[:, rng.choice(n, 9, replace=False)] *= rng.uniform(50, 100, (9, 1))
    if kind == "large norms":
        tokens *= LARGE[precision]
    tokens = tokens.astype(DTYPES[precision])
    norms = np.linalg.norm(tokens.astype(np.float64), axis=-1) if norms is None else norms
    return {"tokens": tokens, "norms": norms.astype(np.float32), "salience": salience.astype(np.float32)}


def exact_rows(rng: np.random.Generator, groups: int, n: int, d: int) -> Array:
    """Return rows of four equal magnitudes or one: their cosines are multiples of 1/4, in any arithmetic."""
    rows = np.zeros((groups, n, d))
    for group, token in product(range(groups), range(n)):
        places = rng.choice(d, rng.choice([1, 4]), replace=False)
        rows[group, token, places] = rng.choice([-1.0, 1.0], len(places))
    return rows
