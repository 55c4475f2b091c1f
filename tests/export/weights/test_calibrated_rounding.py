"""Calibrated rounding: against a slow reference, and never worse than rounding to the nearest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from sinkprune.calibration.rounding import InputProducts, calibrated
from sinkprune.contract.precision import Array
from sinkprune.export.weights.rounding import RoundedMatrix, rounded

FP32 = np.dtype(np.float32)


def inputs_like_a_model(rows: int, width: int, seed: int) -> Array:
    """Inputs that go together, a few of them large."""
    random = np.random.default_rng(seed)
    mixed = random.standard_normal((rows, width // 4)) @ random.standard_normal((width // 4, width))
    mixed[:, ::17] *= 8
    return (mixed + 0.5 * random.standard_normal((rows, width))).astype(np.float32)


def square_errors(weight: Array, of: RoundedMatrix, seen: Array) -> Array:
    """[outputs]: the sum of the squares of each output's errors on the inputs `seen`."""
    matrix = of.codes * np.repeat(of.scales.astype(np.float64), weight.shape[1] // of.scales.shape[1], axis=1)
    return ((seen.astype(np.float64) @ (matrix - weight).T) ** 2).sum(axis=0)


def slowly_calibrated(weight: Array, products: Array, most: int, block: int) -> tuple[Array, Array]:
    """Codes and scales [outputs,inputs], output by output: GPTQ as its paper has it, with an inverse that shrinks,
    then one code after the other chosen for the least error of all."""
    inputs = weight.shape[1]
    damped = products.astype(np.float64) + 0.01 * np.trace(products) / inputs * np.eye(inputs)
    codes, steps = np.zeros(weight.shape, int), np.zeros(weight.shape)
    for output, exact in enumerate(weight.astype(np.float64)):
        for start in range(0, inputs, block):
            part, price = exact[start : start + block], np.diag(damped)[start : start + block]
            tried = [np.float32(abs(part).max() / most * share) for share in np.linspace(1.0, 0.4, 25)]
            off = [(price * (np.clip(np.rint(part / s), -most, most) * s - part) ** 2).sum() for s in tried]
            steps[output, start : start + block] = tried[int(np.argmin(off))]
        step, left = steps[output], exact.copy()
        inverse = np.linalg.inv(damped)
        for place in range(inputs):
            codes[output, place] = np.clip(np.rint(left[place] / step[place]), -most, most)
            error = left[place] - codes[output, place] * step[place]
            left[place:] -= error / inverse[0, 0] * inverse[0]
            inverse = inverse[1:, 1:] - np.outer(inverse[1:, 0], inverse[0, 1:]) / inverse[0, 0]
        for _ in range(4):
            for place in range(inputs):
                error = codes[output] * step - exact
                error[place] = 0
                wanted = exact[place] - damped[place] @ error / damped[place, place]
                codes[output, place] = np.clip(np.rint(wanted / step[place]), -most, most)
    return codes, steps


@pytest.mark.parametrize(("most", "block"), [(7, 32), (7, 96), (127, 96)])
def test_codes_and_scales_are_the_references(most: int, block: int) -> None:
    seen = inputs_like_a_model(400, 96, seed=most + block)
    weight = np.random.default_rng(5).standard_normal((24, 96), np.float32)
    products = seen.T @ seen
    found = calibrated(weight, InputProducts(products), most, block, FP32).rounded
    codes, steps = slowly_calibrated(weight, products, most, block)
    np.testing.assert_allclose(np.repeat(found.scales, block, axis=1), steps, rtol=1e-6)
    # A value in the middle of two codes may go either way, and others then follow it.
    assert (found.codes == codes).mean() > 0.995
    expected = (np.linalg.norm(seen @ (codes * steps - weight).T, axis=0) ** 2).sum()
    np.testing.assert_allclose(square_errors(weight, found, seen).sum(), expected, rtol=5e-3)


WEIGHTS = arrays.arrays(np.float32, (3, 8), elements=st.floats(-1e3, 1e3, width=32))
SEEN = arrays.arrays(np.float32, (5, 8), elements=st.floats(-1e3, 1e3, width=32))


@given(WEIGHTS, SEEN, st.sampled_from([(127, 8), (7, 8), (7, 4)]), st.sampled_from([np.float32, np.float16]))
def test_no_output_is_further_off_than_to_the_nearest(
    weight: Array, seen: Array, kind: tuple[int, int], dtype: Any
) -> None:
    (most, block), products = kind, seen.T @ seen
    found, nearest = (
        calibrated(weight, InputProducts(products), most, block, np.dtype(dtype)).rounded,
        rounded(weight, most, block, np.dtype(dtype)),
    )
    off, nearest_off = (square_errors(weight, of, seen) for of in (found, nearest))
    assert (off <= nearest_off * (1 + 1e-4) + 1e-6 * (seen**2).sum()).all()
    assert found.codes.dtype == np.int8 and np.abs(found.codes).max() <= most
    assert found.scales.dtype == dtype and (found.scales > 0).all() and np.isfinite(found.scales).all()
    assert found.scales.shape == nearest.scales.shape
