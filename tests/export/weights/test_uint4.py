"""uint4: codes, scales and zero points against a slow reference, the graph against dequantised weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from onnx import numpy_helper

from sinkprune.contract.precision import Array
from sinkprune.export.weights.rounding import rounded, rounded_from_zero
from support.programs.commands import assert_refused, run

FLOATS = st.floats(-1e4, 1e4, width=32)
EXTREME = st.floats(width=32, allow_nan=False, allow_infinity=False)


def slowly_rounded(weight: Array, most: int, block: int, dtype: Any) -> tuple[Array, Array, Array]:
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


@given(
    st.data(),
    st.sampled_from([8, 4]),
    st.sampled_from([np.float32, np.float16]),
    st.sampled_from([FLOATS, EXTREME, st.floats(1, 2, width=32), st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5])]),
)
def test_codes_scales_and_zero_points_are_the_references(
    data: st.DataObject, block: int, dtype: Any, values: st.SearchStrategy[float]
) -> None:
    weight = data.draw(arrays.arrays(np.float32, (3, 8), elements=values))
    found = rounded_from_zero(weight, 15, block, np.dtype(dtype))
    codes, scales, zeros = slowly_rounded(weight, 15, block, dtype)
    np.testing.assert_array_equal(found.scales, scales)
    np.testing.assert_array_equal(found.zeros, zeros)
    np.testing.assert_array_equal(found.codes, codes)
    assert found.scales.dtype == dtype and (found.scales > 0).all() and np.isfinite(found.scales).all()


@given(arrays.arrays(np.float32, (2, 64), elements=FLOATS))
def test_no_value_is_further_off_than_a_step(weight: Array) -> None:
    found = rounded_from_zero(weight, 15, 32, np.dtype(np.float32))
    steps = np.repeat(found.scales, 32, axis=1)
    assert (np.abs(found.values() - weight) <= steps * (1 + 1e-5)).all()
    # Zero is a code of its own.
    assert (found.values()[weight == 0] == 0).all()


@given(arrays.arrays(np.float32, (2, 8), elements=FLOATS))
def test_values_are_what_codes_mean(weight: Array) -> None:
    even, odd = rounded(weight, 7, 4, np.dtype(np.float32)), rounded_from_zero(weight, 15, 4, np.dtype(np.float32))
    for o in range(2):
        for i in range(8):
            assert even.values()[o, i] == even.codes[o, i] * even.scales[o, i // 4]
            assert (
                odd.values()[o, i]
                == np.float32(int(odd.codes[o, i]) - int(odd.zeros[o, i // 4])) * (odd.scales[o, i // 4])
            )


def dequantised(graph: onnx.GraphProto) -> dict[str, Array]:
    """Every matrix [inputs,outputs] of 4 bits with zero points, by its tensor's name."""
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    found = {}
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and len(node.input) == 3:
            codes, scales, zeros = (values[name].astype(np.float32) for name in node.input)
            repeats = len(codes) // len(scales)
            found[node.input[0]] = (codes - np.repeat(zeros, repeats, 0)) * np.repeat(scales, repeats, 0)
    return found


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_graph_computes_with_the_dequantised_weights(
    precision: str, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    path = bundle("gqa-112", precision, weights="uint4") / "graphs/projector.onnx"
    quantised, floats = onnx.load(path), onnx.load(path)
    matrices = dequantised(quantised.graph)
    assert len(matrices) == 2
    exact = {
        t.name: numpy_helper.to_array(t)
        for t in onnx.load(bundle("gqa-112") / path.relative_to(path.parents[1])).graph.initializer
    }
    for name, matrix in matrices.items():
        error = np.linalg.norm(matrix - exact[name]) / np.linalg.norm(exact[name])
        assert 0.01 < error < 0.15
    for node in [node for node in floats.graph.node if node.op_type == "DequantizeLinear"]:
        dtype = exact[node.input[0]].dtype if precision == "fp32" else np.float16
        floats.graph.initializer.append(
            numpy_helper.from_array(matrices[node.input[0]].astype(dtype), node.output[0])
        )
        floats.graph.node.remove(node)
    states = (
        np.random.default_rng(3).standard_normal((1, 7, 64)).astype("float32" if precision == "fp32" else "float16")
    )
    found = []
    for model in (quantised, floats):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        onnx.save(model, tmp_path / "graph.onnx")
        session = onnxruntime.InferenceSession(tmp_path / "graph.onnx", options, providers=["CPUExecutionProvider"])
        found.append(session.run(None, {model.graph.input[0].name: states})[0].astype(np.float32))
    close = 1e-4 if precision == "fp32" else 1e-2
    np.testing.assert_allclose(found[0], found[1], rtol=close, atol=close * np.abs(found[1]).max())


@pytest.mark.parametrize("option", ["--weights", "--vision-weights"])
def test_it_is_not_for_tensorrt(option: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    export = ("sinkprune-export", checkpoint("gqa-112"), "-o", tmp_path / "bundle", "--budgets", "retain-64")
    refused = run(*export, option, "uint4", "--dialect", "opset20")
    assert_refused(refused, "takes no zero points", f"Export with {option} int4", "--dialect opset24")
    assert not (tmp_path / "bundle").exists()
    assert run(*export, option, "uint4", "--precision", "fp16").code == 0
    build = ("sinkprune-build", tmp_path / "bundle", "-o", tmp_path / "engines")
    refused = run(*build, "--target", "tensorrt-rtx", "--sm", "86")
    assert_refused(refused, "has uint4 weights, and tensorrt-rtx takes no zero points", f"opset24 {option} int4")
    assert not (tmp_path / "engines").exists()
    assert run(*build, "--target", "onnxruntime").code == 0
