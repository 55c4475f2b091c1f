"""How far two arrays are apart, row by row: no outlier hides the others, and a sink is far longer than they."""

from __future__ import annotations

import numpy as np

from sinkprune.contract.precision import Array
from sinkprune.engines.gate.limits import Kind

# Rows that are much smaller than others are compared with those: their own rounding tells nothing.
_FLOOR = 0.1


def errors(kind: Kind, found: Array, expected: Array) -> Array:
    """[rows] fp64: how much each row differs, relatively; infinite for what is not finite or of another shape.

    Of a row that is the length of the difference over that of what was expected, of a value the same, and of a logit
    the difference over the root mean square of all. Attention's [1,H,S,h] has S rows.
    """
    if found.shape != expected.shape or not np.isfinite(found).all():
        return np.array([np.inf])
    exact, apart = _rows(kind, expected), _rows(kind, found) - _rows(kind, expected)
    lengths = np.linalg.norm(exact, axis=-1)
    if not lengths.size:
        return lengths
    if kind == "logits":
        floor = np.full_like(lengths, np.sqrt(np.mean(np.square(exact))))
    else:
        floor = np.maximum(lengths, _FLOOR * np.median(lengths))
    result: Array = np.linalg.norm(apart, axis=-1) / np.maximum(floor, np.finfo(np.float64).tiny)
    return result


def differing(found: Array, expected: Array) -> Array:
    """[1]: how many of the indices `expected` are others in `found`; all of them where there are more or fewer."""
    alike = found.shape == expected.shape
    return np.array([(found != expected).sum() if alike else max(found.size, expected.size, 1)], np.float64)


def _rows(kind: Kind, array: Array) -> Array:
    """[rows,width] fp64."""
    exact = array.astype(np.float64)
    if kind != "rows":
        return exact.reshape(-1, 1)
    if exact.ndim == 4:
        exact = exact.transpose(0, 2, 1, 3).reshape(-1, exact.shape[1] * exact.shape[3])
    return exact.reshape(-1, exact.shape[-1])
