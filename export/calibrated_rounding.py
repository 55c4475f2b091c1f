"""Weights rounded so that what a layer gives changes least on inputs that were seen, in codes and scales like those
to the nearest.

Of a layer's inputs X only their products X^T X matter: an output whose weights are off by e has the square error
e^T (X^T X) e. Scales are searched first. Then each code is chosen to make up for the errors of those before it (GPTQ,
arXiv:2210.17323, in the form of arXiv:2307.13304), and then again for those of all others (arXiv:2309.01885).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sinkprune.contract.precision import Array
from sinkprune.export.rounding import Rounded, rounded, stored_scales

_SCALES = np.linspace(1.0, 0.4, 25, dtype=np.float32)
"""Scales that are tried, of the one that meets the largest value."""
_DAMPING = 0.01
"""What is added to every input's product with itself, of their mean: inputs that were not seen have a price too."""
_SWEEPS = 4
"""How often all codes are chosen again; later ones gain next to nothing."""
_INPUTS, _OUTPUTS = 64, 2048
"""How many inputs share a product with the errors of all, and how many outputs are rounded at a time."""


def calibrated(weight: Array, products: Array, most: int, block: int, dtype: np.dtype[Any]) -> Rounded:
    """`weight` [outputs,inputs] in the codes and scales of `rounded`, chosen for inputs of these `products`.

    `products` [inputs,inputs] is X^T X of the layer's inputs X. On X no output is further off than to the nearest.
    """
    nearest = rounded(weight, most, block, dtype)
    damped = _damped(products)
    before, all_others = _of_those_before(damped), _of_all_others(damped)
    codes, scales = np.empty_like(nearest.codes), np.empty_like(nearest.scales)
    for start in range(0, len(weight), _OUTPUTS):
        rows = slice(start, start + _OUTPUTS)
        exact = np.ascontiguousarray(weight[rows].T.astype(np.float32))
        found = _searched_scales(exact, np.diag(damped), most, block, dtype)
        steps = np.repeat(found.astype(np.float32), block, axis=0)
        errors = np.zeros_like(exact)
        for feedback in (before, *[all_others] * _SWEEPS):
            chosen = _sweep(exact, steps, errors, feedback, most)
        codes[rows], scales[rows] = chosen.T, found.T
    best = Rounded(codes, scales)
    worse = square_errors(weight, best, products) > square_errors(weight, nearest, products)
    codes[worse], scales[worse] = nearest.codes[worse], nearest.scales[worse]
    return best


def square_errors(weight: Array, of: Rounded, products: Array) -> Array:
    """[outputs]: how far each output of `weight` [outputs,inputs], rounded, is off on inputs of these `products`; the
    sum of squares."""
    errors = of.values() - weight.astype(np.float32)
    found: Array = np.einsum("oi,oi->o", errors @ products, errors)
    return found


def _damped(products: Array) -> Array:
    added, damped = _DAMPING * float(np.diag(products).mean()), products.copy()
    # Where nothing was seen at all, all inputs count alike.
    damped[np.diag_indices_from(damped)] += added if added > 0 else 1
    return damped


def _of_those_before(damped: Array) -> Array:
    """[inputs,inputs], what each input must make up for of the errors of those before it, if those behind it make up
    for its own: U^T - 1 of U D U^T, with U upper and unit triangular."""
    lower = np.linalg.cholesky(damped[::-1, ::-1].astype(np.float64))
    upper = lower[::-1, ::-1]
    feedback: Array = (upper / np.diag(upper)).T.astype(np.float32)
    np.fill_diagonal(feedback, 0)
    return feedback


def _of_all_others(damped: Array) -> Array:
    """[inputs,inputs], what each input must make up for of the errors of all others as they are."""
    feedback: Array = damped / np.diag(damped)[:, None]
    np.fill_diagonal(feedback, 0)
    return feedback


def _searched_scales(exact: Array, weights: Array, most: int, block: int, dtype: np.dtype[Any]) -> Array:
    """[blocks,outputs]: the scale with which each block of `exact` [inputs,outputs], rounded to the nearest, is least
    off, in squares weighted by the inputs' `weights` [inputs]. Smaller scales clip the largest values."""
    inputs, outputs = exact.shape
    blocks, weights = exact.reshape(-1, block, outputs), weights.reshape(-1, block, 1)
    largest = np.abs(blocks).max(axis=1) / np.float32(most)
    best, least = stored_scales(largest, dtype), np.full((inputs // block, outputs), np.inf, np.float32)
    for share in _SCALES:
        scales = stored_scales(largest * share, dtype)
        step = scales.astype(np.float32)[:, None]
        off = np.clip(np.rint(blocks / step), -most, most) * step - blocks
        error = (weights * off * off).sum(axis=1)
        better = error < least
        best[better], least[better] = scales[better], error[better]
    return best


def _sweep(exact: Array, steps: Array, errors: Array, feedback: Array, most: int) -> Array:
    """Choose each input's codes in turn, to make up for `feedback` of the `errors`, which are kept up to date.

    All but `feedback` are [inputs,outputs], and so are the codes that are returned.
    """
    codes = np.empty(exact.shape, np.int8)
    for start in range(0, len(exact), _INPUTS):
        rows = slice(start, start + _INPUTS)
        inside, owed = feedback[rows, rows], feedback[rows] @ errors
        for place, row in enumerate(range(start, start + len(owed))):
            # A block of zeros has the smallest scale there is: infinitely many of it make up for anything.
            with np.errstate(over="ignore"):
                wanted = (exact[row] - owed[place]) / steps[row]
            chosen = np.clip(np.rint(wanted), -most, most)
            error = chosen * steps[row] - exact[row]
            owed[place + 1 :] += np.outer(inside[place + 1 :, place], error - errors[row])
            codes[row], errors[row] = chosen, error
    return codes
