"""Weights rounded so that what a layer gives changes least on inputs that were seen, in codes and scales like those
to the nearest.

Of a layer's inputs X only their products X^T X matter: an output whose weights are off by e has the square error
e^T (X^T X) e. Scales are searched first. Then each code is chosen to make up for the errors of those before it (GPTQ,
arXiv:2210.17323, in the form of arXiv:2307.13304), and then again for those of all others (arXiv:2309.01885).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from sinkprune.contract.precision import Array
from sinkprune.export.weights.rounding import Rounded, rounded, stored_scales

_SCALES = np.linspace(1.0, 0.4, 25, dtype=np.float32)
"""Scales that are tried, of the one that meets the largest value."""
_DAMPING = 0.01
"""What is added to every input's product with itself, of their mean: inputs that were not seen have a price too."""
_SWEEPS = 4
"""How often all codes are chosen again; later ones gain next to nothing."""
_INPUTS, _OUTPUTS = 128, 2048
"""How many inputs share a product with the errors of all, and how many outputs are rounded at a time."""


class Inputs:
    """What layers are given, as rounding their matrices needs it. Layers that are given the same share one."""

    def __init__(self, products: Array) -> None:
        """`products` [inputs,inputs] fp32 is X^T X of the inputs X."""
        self.products = products
        """X^T X."""
        added = _DAMPING * float(np.diag(products).mean())
        # Where nothing was seen at all, all inputs count alike.
        self._added = np.float32(added if added > 0 else 1)
        self.squares: Array = np.diag(products) + self._added
        """[inputs]: what each input's error costs by itself."""

    def of_all_others(self, rows: slice) -> Array:
        """[rows,inputs], what these inputs must make up for of the errors of all others as they are."""
        feedback: Array = self.products[rows] / self.squares[rows, None]
        feedback[:, rows][np.diag_indices(len(feedback))] = 0
        return feedback

    def of_those_before(self, rows: slice) -> Array:
        """[rows,rows.stop], what these inputs must make up for of the errors of those before, if those behind make up
        for theirs."""
        return self._before[rows, : rows.stop]

    @cached_property
    def _before(self) -> Array:
        """[inputs,inputs] U^T - 1 of U D U^T, with U upper and unit triangular."""
        flipped = self.products[::-1, ::-1].astype(np.float64)
        flipped[np.diag_indices_from(flipped)] = self.squares[::-1]
        lower = np.linalg.cholesky(flipped)
        del flipped
        lower /= np.diag(lower).copy()
        feedback = lower[::-1, ::-1].T.astype(np.float32)
        np.fill_diagonal(feedback, 0)
        return feedback


class Off(NamedTuple):
    """How far each of a rounded layer's outputs is off on the inputs that were seen, as sums over those."""

    square: Array
    """[outputs] fp32: of the squares of their errors."""
    along: Array
    """[outputs] fp32: of the products of the errors with the outputs themselves."""


class Calibrated(NamedTuple):
    """A matrix, rounded for inputs that were seen."""

    rounded: Rounded
    length: Array
    """[outputs] fp32: the sum of the squares of each output on those inputs, without a bias."""
    off: Off
    nearest_off: Off
    """If every weight had been rounded to the nearest."""


def calibrated(weight: Array, inputs: Inputs, most: int, block: int, dtype: np.dtype[Any]) -> Calibrated:
    """`weight` [outputs,inputs] in the codes and scales of `rounded`, chosen for what its layer is given.

    On those no output is further off than to the nearest.
    """
    best = rounded(weight, most, block, dtype)
    sums = np.empty((5, len(weight)), np.float32)
    for start in range(0, len(weight), _OUTPUTS):
        rows = slice(start, start + _OUTPUTS)
        exact = np.ascontiguousarray(weight[rows].T.astype(np.float32))
        nearest = Rounded(best.codes[rows], best.scales[rows]).values().T - exact
        scales = _searched_scales(exact, inputs.squares, most, block, dtype)
        steps, errors = np.repeat(scales.astype(np.float32), block, axis=0), np.zeros_like(exact)
        for feedback in (inputs.of_those_before, *[inputs.of_all_others] * _SWEEPS):
            codes = _sweep(exact, steps, errors, feedback, most)
        off, along = _off(exact, errors, inputs)
        nearest_off, along_nearest = _off(exact, nearest, inputs)
        better = off <= nearest_off
        best.codes[rows][better], best.scales[rows][better] = codes.T[better], scales.T[better]
        least, least_along = np.minimum(off, nearest_off), np.where(better, along, along_nearest)
        squares = _along(exact, inputs.products @ exact)
        sums[:, rows] = squares, least, least_along, nearest_off, along_nearest
    length, *offs = sums
    return Calibrated(best, length, Off(*offs[:2]), Off(*offs[2:]))


def _off(exact: Array, errors: Array, inputs: Inputs) -> tuple[Array, Array]:
    """[outputs] each, where weights [inputs,outputs] are off by `errors`: the square of each output's error, and its
    product with the output."""
    seen = inputs.products @ errors
    return np.maximum(_along(errors, seen), 0), _along(exact, seen)


def _along(left: Array, right: Array) -> Array:
    found: Array = np.einsum("io,io->o", left, right)
    return found


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


def _sweep(exact: Array, steps: Array, errors: Array, feedback: Callable[[slice], Array], most: int) -> Array:
    """Choose each input's codes in turn, to make up for the `feedback` of the `errors`, which are kept up to date.

    All arrays are [inputs,outputs], and so are the codes that are returned.
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
    """Choose the codes of some inputs in turn, all arrays of theirs; returns by how much their errors change.

    `owed` is what they must make up for before any of them is chosen anew, `feedback` [inputs,inputs] theirs of each
    other. In halves, because a product with many changes takes less time than many with one.
    """
    if len(exact) == 1:
        # A block of zeros has the smallest scale there is: infinitely many of it make up for anything.
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
