"""Rounding of weights for the inputs that a layer has seen.

Only the products X^T X of a layer's inputs X matter: an output whose weights have the error e has the squared error
e^T (X^T X) e. The scales are searched first. Then each code is chosen to compensate the errors of earlier codes
(GPTQ, arXiv:2210.17323, in the form of arXiv:2307.13304), and then again the errors of all others (arXiv:2309.01885).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from sinkprune.contract.precision import Array
from sinkprune.export.weights.rounding import RoundedMatrix, rounded, stored_scales

_SCALES = np.linspace(1.0, 0.4, 25, dtype=np.float32)
"""The scales to try, as shares of the scale that represents the largest value."""
_DAMPING = 0.01
"""The share of the mean product of an input with itself that is added to each, so that unseen inputs count too."""
_SWEEPS = 4
"""The sweeps that choose all codes again. More sweeps gain almost nothing."""
_INPUTS, _OUTPUTS = 128, 2048
"""The inputs that share a product with all errors, and the outputs that are rounded at a time."""


class InputProducts:
    """The products of the inputs of a layer, or of several layers with the same inputs."""

    def __init__(self, products: Array) -> None:
        """Take `products` [inputs,inputs] fp32, X^T X of the inputs X."""
        self.products = products
        """X^T X."""
        added = _DAMPING * float(np.diag(products).mean())
        # Without any inputs, all count alike.
        self._added = np.float32(added if added > 0 else 1)
        self.squares: Array = np.diag(products) + self._added
        """[inputs]: the cost of an error at each input alone."""

    def feedback_of_others(self, rows: slice) -> Array:
        """Return [rows,inputs]: by how much these inputs compensate the present errors of all others."""
        feedback: Array = self.products[rows] / self.squares[rows, None]
        feedback[:, rows][np.diag_indices(len(feedback))] = 0
        return feedback

    def feedback_of_earlier(self, rows: slice) -> Array:
        """Return [rows,rows.stop]: by how much these inputs compensate the errors of earlier ones, if later inputs
        compensate theirs."""
        return self._before[rows, : rows.stop]

    @cached_property
    def _before(self) -> Array:
        """[inputs,inputs]: U^T - 1 of U D U^T, with U upper and unit triangular."""
        flipped = self.products[::-1, ::-1].astype(np.float64)
        flipped[np.diag_indices_from(flipped)] = self.squares[::-1]
        lower = np.linalg.cholesky(flipped)
        del flipped
        lower /= np.diag(lower).copy()
        feedback = lower[::-1, ::-1].T.astype(np.float32)
        np.fill_diagonal(feedback, 0)
        return feedback


class CalibratedMatrix(NamedTuple):
    """A matrix that was rounded for inputs, with sums over these inputs for each output, without a bias."""

    rounded: RoundedMatrix
    squares: Array
    """[outputs] fp32: of the squares of the output."""
    errors: Array
    """[outputs] fp32: of the squares of its error."""
    nearest_errors: Array
    """[outputs] fp32: the same for rounding every weight to the nearest."""


def calibrated(weight: Array, inputs: InputProducts, most: int, block: int, dtype: np.dtype[Any]) -> CalibratedMatrix:
    """Return `weight` [outputs,inputs] in codes and scales as of `rounded`, chosen for the `inputs` of its layer.

    On these inputs, no output has a larger error than with rounding to the nearest.
    """
    best = rounded(weight, most, block, dtype)
    sums = np.empty((3, len(weight)), np.float32)
    for start in range(0, len(weight), _OUTPUTS):
        rows = slice(start, start + _OUTPUTS)
        exact = np.ascontiguousarray(weight[rows].T.astype(np.float32))
        nearest = RoundedMatrix(best.codes[rows], best.scales[rows]).values().T - exact
        scales = _searched_scales(exact, inputs.squares, most, block, dtype)
        steps, errors = np.repeat(scales.astype(np.float32), block, axis=0), np.zeros_like(exact)
        for feedback in (inputs.feedback_of_earlier, *[inputs.feedback_of_others] * _SWEEPS):
            codes = _sweep(exact, steps, errors, feedback, most)
        squares, off, nearest_off = (_squares(weights, inputs) for weights in (exact, errors, nearest))
        better = off <= nearest_off
        best.codes[rows][better], best.scales[rows][better] = codes.T[better], scales.T[better]
        sums[:, rows] = squares, np.minimum(off, nearest_off), nearest_off
    return CalibratedMatrix(best, *sums)


def _squares(weights: Array, inputs: InputProducts) -> Array:
    """Return [outputs]: the sum of the squares of each output of `weights` [inputs,outputs]."""
    return np.maximum(np.einsum("io,io->o", weights, inputs.products @ weights), 0)


def _searched_scales(exact: Array, weights: Array, most: int, block: int, dtype: np.dtype[Any]) -> Array:
    """Return [blocks,outputs]: the scale of least squared error of each block of `exact` [inputs,outputs], rounded to
    the nearest. `weights` [inputs] weight the squares. Smaller scales clip the largest values."""
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


def _sweep(exact: Array, steps: Array, errors: Array, feedback: Callable[[slice], Array], most: int) -> Array:
    """Choose each input's codes in turn to compensate the `feedback` of the `errors`, which are updated.

    All arrays are [inputs,outputs], and so are the returned codes.
    """
    codes = np.empty(exact.shape, np.int8)
    for start in range(0, len(exact), _INPUTS):
        rows = slice(start, start + _INPUTS)
        of_all = feedback(rows)
        owed = of_all @ errors[: of_all.shape[1]]
        _choose(exact[rows], steps[rows], errors[rows], codes[rows], owed, of_all[:, rows], most)
    return codes


def _choose(
    exact: Array, steps: Array, errors: Array, codes: Array, owed: Array, feedback: Array, most: int
) -> Array:
    """Choose the codes of some inputs in turn, and return the changes of their errors.

    `owed` is the feedback before any of these codes changes; `feedback` [inputs,inputs] is that among them. They are
    chosen in halves, because one product with many changes is faster than many products with one.
    """
    if len(exact) == 1:
        # A block of zeros has the smallest possible scale, so that a division may overflow.
        with np.errstate(over="ignore"):
            wanted = (exact - owed) / steps
        np.clip(np.rint(wanted, out=wanted), -most, most, out=wanted)
        codes[...] = wanted
        wanted *= steps
        wanted -= exact
        changes: Array = wanted - errors
        errors[...] = wanted
        return changes
    half = len(exact) // 2
    halves = (slice(half), slice(half, None))
    changes = np.empty_like(exact)
    for part in halves:
        if part.start:
            owed[part] += feedback[part, :half] @ changes[:half]
        own = exact[part], steps[part], errors[part], codes[part], owed[part]
        changes[part] = _choose(*own, feedback[part, part], most)
    return changes
