"""Weights: their places in files, values that are not finite, and their forms against dequantised weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from onnx.external_data_helper import ExternalDataInfo, uses_external_data
from safetensors.numpy import load_file, save_file

from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import CheckpointError, UsageError
from sinkprune.contract.precision import Array
from sinkprune.export.weights import PRECISIONS, chosen_forms
from support.models.stored_matrices import initializers, stored_matrices
from support.programs.commands import assert_refused, run, succeed

PAGE = 4096


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_large_weights_start_on_pages_and_none_overlap(precision: str, bundle: Callable[..., Path]) -> None:
    for path in (bundle("gqa-112", precision) / "graphs").glob("*.onnx"):
        tensors = onnx.load(path, load_external_data=False).graph.initializer
        weights = [tensor for tensor in tensors if uses_external_data(tensor)]
        # Constants, as shapes and scales are, stay in the graph.
        assert all(tensor.ByteSize() < 200 for tensor in tensors if tensor not in weights)
        assert weights, path
        end, file = 0, path.parent / "weights" / f"{path.stem}.bin"
        for tensor in weights:
            where = ExternalDataInfo(tensor)
            assert path.parent / where.location == file
            assert where.offset >= end
            assert where.offset % (PAGE if where.length >= PAGE else 2) == 0
            end = where.offset + where.length
        assert file.stat().st_size == end


EMBEDDING = "language_model.embed_tokens.weight"
DOWN = "language_model.layers.3.mlp.down_proj.weight"
KEYS = "language_model.layers.3.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("name", "value", "options", "message"),
    [
        (DOWN, np.nan, (), "holds NaN or infinity, expected finite numbers"),
        (DOWN, np.nan, ("--precision", "fp16"), "holds NaN or infinity"),
        (DOWN, np.nan, ("--weights", "int8"), "holds NaN or infinity"),
        (DOWN, -7e4, ("--weights", "fp16"), "holds values up to 7e+04, expected at most 65504, as fp16 can hold. "),
        *((name, -7e4, ("--precision", "fp16"), "holds values up to 7e+04") for name in (DOWN, EMBEDDING, KEYS)),
        (EMBEDDING, np.nan, (), "holds NaN or infinity"),
    ],
)
def test_a_weight_that_is_not_finite_is_named(
    name: str, value: float, options: tuple[str, ...], message: str, copied: Callable[..., Path], tmp_path: Path
) -> None:
    # Its embedding table is not its head, too.
    folder = copied("mha-336")
    tensors = load_file(folder / "model.safetensors")
    stored = next(stored for stored in tensors if stored.endswith(name.removeprefix("language_model.")))
    tensors[stored][-1, -1] = value
    save_file(tensors, folder / "model.safetensors")
    outcome = run("sinkprune-export", folder, "-o", tmp_path / "out", *options)
    assert_refused(outcome, f"tensor '{name}'", message)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@given(data=st.data())
def test_whatever_is_finite_is_converted_as_numpy_does(precision: str, data: st.DataObject) -> None:
    shapes = arrays.array_shapes(max_dims=3, max_side=5)
    array: Array = data.draw(arrays.arrays(np.float32, shapes)).T
    with np.errstate(over="ignore"):
        expected = array.astype(PRECISIONS[precision].numpy)
    if np.isfinite(expected).all():
        np.testing.assert_array_equal(PRECISIONS[precision].converted("w", array), expected)
    else:
        with pytest.raises(CheckpointError, match="tensor 'w' holds"):
            PRECISIONS[precision].converted("w", array)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_graph_holds_each_matrix_rounded(weights: str, precision: str, bundle: Callable[..., Path]) -> None:
    plain, small = (bundle("gqa-112", "fp32"), bundle("gqa-112", precision, weights=weights))
    forms = read_bundle(small).manifest.weights
    assert (forms.decoder, forms.vision, forms.block_size) == (weights, "int8", 128 if weights == "int4" else None)
    for graph in ("vision", "projector", "decoder_0", "decoder_2", "head"):
        original, exact = onnx.load(plain / f"graphs/{graph}.onnx"), initializers(plain / f"graphs/{graph}.onnx")
        multiplied = {node.input[1] for node in original.graph.node if node.op_type == "MatMul"} & exact.keys()
        matrices = stored_matrices(small / f"graphs/{graph}.onnx")
        assert matrices.keys() == multiplied
        int4 = weights == "int4" and graph != "vision"
        for name, (matrix, size) in matrices.items():
            assert size == (64 if len(matrix) == 64 else 32) if int4 else size == len(matrix)
            blocks = np.abs(exact[name]).reshape(-1, size, matrix.shape[1]).max(axis=1)
            step = np.repeat(blocks / (7 if int4 else 127), size, axis=0)
            assert (np.abs(matrix - exact[name]) <= step * (0.51 if precision == "fp32" else 0.6) + 1e-6).all(), name
            assert np.abs(matrix - exact[name]).max() > 0


@pytest.mark.parametrize("weights", ["fp16", "bf16"])
def test_floats_of_another_type_are_cast_in_the_graph(weights: str, bundle: Callable[..., Path]) -> None:
    exact, stored = (
        initializers(bundle("gqa-112", weights=form) / "graphs/decoder_0.onnx") for form in (None, weights)
    )
    dtype = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}[weights]
    name = "language_model.layers.0.mlp.up_proj.weight"
    assert stored[name].dtype == dtype
    np.testing.assert_array_equal(stored[name], exact[name].astype(dtype))
    assert stored["language_model.layers.0.input_layernorm.weight"].dtype == np.float32


def test_forms_that_do_not_fit_are_rejected() -> None:
    for precision, *requested, message in (
        ("fp16", "fp32", None, None, "--weights is fp32, but states are fp16."),
        ("fp16", None, "fp32", None, "--vision-weights is fp32, but states are fp16."),
        ("fp32", "int8", None, 64, "--block-size is 64, but no weights are int4."),
    ):
        with pytest.raises(UsageError, match=message):
            chosen_forms(PRECISIONS[precision], *requested)


@pytest.mark.parametrize("option", ["--weights", "--vision-weights"])
def test_uint4_is_not_for_tensorrt(option: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    export = ("sinkprune-export", checkpoint("gqa-112"), "-o", tmp_path / "bundle", "--budgets", "retain-64")
    refused = run(*export, option, "uint4", "--dialect", "opset20")
    assert_refused(refused, "takes no zero points", f"Export with {option} int4", "--dialect opset24")
    assert not (tmp_path / "bundle").exists()
    succeed(*export, option, "uint4", "--precision", "fp16")
    build = ("sinkprune-build", tmp_path / "bundle", "-o", tmp_path / "engines")
    refused = run(*build, "--target", "tensorrt-rtx", "--sm", "86")
    assert_refused(refused, "has uint4 weights, and tensorrt-rtx takes no zero points", f"opset24 {option} int4")
    assert not (tmp_path / "engines").exists()
    succeed(*build, "--target", "onnxruntime")
