"""Codes, scales and zero points against slow references."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from onnx import numpy_helper

from sinkprune.contract.precision import Array
from sinkprune.export.weights.rounding import packed, rounded, rounded_from_zero

FLOATS = st.floats(-1e4, 1e4, width=32)
VALUES = st.sampled_from(
    [
        FLOATS,
        st.floats(width=32, allow_nan=False, allow_infinity=False),
        st.floats(1, 2, width=32),
        st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5]),
    ]
)
DTYPE = st.sampled_from([np.float32, np.float16])
FP32 = np.dtype(np.float32)


def slowly_rounded(weight: Array, most: int, block: int, dtype: Any) -> tuple[Array, Array]:
    """Codes and scales, value by value."""
    outputs, inputs = weight.shape
    codes, scales = np.zeros((outputs, inputs), int), np.zeros((outputs, inputs // block), dtype)
    for o in range(outputs):
        for b in range(inputs // block):
            values = weight[o, b * block : (b + 1) * block].astype(np.float32)
            limits = np.finfo(dtype)
            scale = min(max(np.float32(max(abs(values)) / np.float32(most)), limits.tiny), limits.max)
            scales[o, b] = scale
            for i, value in enumerate(values):
                code = round(float(np.float32(value / np.float32(scales[o, b]))))
                codes[o, b * block + i] = min(max(code, -most), most)
    return codes, scales


def slowly_rounded_from_zero(weight: Array, most: int, block: int, dtype: Any) -> tuple[Array, Array, Array]:
    """Codes, scales and zero points, value by value."""
    outputs, inputs = weight.shape
    codes, scales = np.zeros((outputs, inputs), int), np.zeros((outputs, inputs // block), dtype)
    zeros, limits = np.zeros(scales.shape, int), np.finfo(dtype)
    for o in range(outputs):
        for b in range(inputs // block):
            values = weight[o, b * block : (b + 1) * block]
            low, high = min(np.float32(0), *values), max(np.float32(0), *values)
            scale = np.float32(high / np.float32(most)) - np.float32(low / np.float32(most))
            scales[o, b] = min(max(scale, limits.tiny), limits.max)
            step = np.float32(scales[o, b])
            zeros[o, b] = min(max(round(float(np.float32(-low / step))), 0), most)
            for i, value in enumerate(values):
                code = round(float(np.float32(value / step))) + int(zeros[o, b])
                codes[o, b * block + i] = min(max(code, 0), most)
    return codes, scales, zeros


@pytest.mark.parametrize(
    ("round_", "reference", "most", "block"),
    [
        (rounded, slowly_rounded, 127, 8),
        (rounded, slowly_rounded, 7, 8),
        (rounded, slowly_rounded, 7, 4),
        (rounded_from_zero, slowly_rounded_from_zero, 15, 8),
        (rounded_from_zero, slowly_rounded_from_zero, 15, 4),
    ],
)
@given(st.data(), DTYPE, VALUES)
def test_rounding_equals_the_reference(
    round_: Any,
    reference: Any,
    most: int,
    block: int,
    data: st.DataObject,
    dtype: Any,
    values: st.SearchStrategy[float],
) -> None:
    weight = data.draw(arrays.arrays(np.float32, (3, 8), elements=values))
    found, expected = round_(weight, most, block, np.dtype(dtype)), reference(weight, most, block, dtype)
    for ours, theirs in zip(filter(lambda array: array is not None, found), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert found.scales.dtype == dtype and (found.scales > 0).all() and np.isfinite(found.scales).all()


@given(arrays.arrays(np.float32, (2, 64), elements=FLOATS))
def test_no_value_is_off_by_more_than_its_step(weight: Array) -> None:
    even, odd = rounded(weight, 7, 32, FP32), rounded_from_zero(weight, 15, 32, FP32)
    for found, share in ((even, 0.5), (odd, 1)):
        steps = np.repeat(found.scales, 32, axis=1)
        assert (np.abs(found.values() - weight) <= share * steps * (1 + 1e-5)).all()
    # Zero is a code of its own.
    assert (odd.values()[weight == 0] == 0).all()


@given(arrays.arrays(np.int8, st.integers(1, 9), elements=st.integers(-8, 7)))
def test_packed_codes_are_onnx_int4(codes: Array) -> None:
    tensor = onnx.TensorProto(data_type=onnx.TensorProto.INT4, dims=codes.shape, raw_data=packed(codes).tobytes())
    np.testing.assert_array_equal(numpy_helper.to_array(tensor).astype(np.int8), codes)
