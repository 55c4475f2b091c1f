"""How far two arrays are apart, in figures that outliers do not hide: a sink's norm is a hundred times a token's."""

from __future__ import annotations

import numpy as np

from sinkprune.contract.precision import Array
from sinkprune.engines.gate.limits import Kind, Limit

# Rows that are much smaller than others are compared with those: their own rounding tells nothing.
_FLOOR = 0.1


def deviation(kind: Kind, found: Array, expected: Array) -> Limit:
    """The relative difference in the median row and in the worst; infinite for what is not finite or of another shape.

    Of a row it is the length of the difference over that of what was expected, of a value the same, and of a logit
    the difference over the root mean square of all. Attention's [1,H,S,h] has a row for each of S.
    """
    if found.shape != expected.shape or not np.isfinite(found).all():
        return Limit(np.inf, np.inf)
    if not expected.size:
        return Limit(0.0, 0.0)
    exact, apart = _rows(kind, expected), _rows(kind, found) - _rows(kind, expected)
    lengths = np.linalg.norm(exact, axis=-1)
    if kind == "logits":
        floor = np.full_like(lengths, np.sqrt(np.mean(np.square(exact))))
    else:
        floor = np.maximum(lengths, _FLOOR * np.median(lengths))
    errors = np.linalg.norm(apart, axis=-1) / np.maximum(floor, np.finfo(np.float64).tiny)
    return Limit(float(np.median(errors)), float(errors.max()))


def differing(found: Array, expected: Array) -> int:
    """How many of the indices `expected` are others in `found`; all of them where there are more or fewer."""
    if found.shape != expected.shape:
        return max(found.size, expected.size, 1)
    return int((found != expected).sum())


def _rows(kind: Kind, array: Array) -> Array:
    """[rows, width] fp64."""
    exact = array.astype(np.float64)
    if kind != "rows":
        return exact.reshape(-1, 1)
    if exact.ndim == 4:
        exact = exact.transpose(0, 2, 1, 3).reshape(*exact.shape[:1], exact.shape[2], -1)
    return exact.reshape(-1, exact.shape[-1])
