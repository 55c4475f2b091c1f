"""The forms of weights in graphs, against dequantised weights; which forms go together, and where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest

from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import UsageError
from sinkprune.export.weights import PRECISIONS, chosen_forms
from support.models.stored_matrices import initializers, stored_matrices
from support.programs.commands import assert_refused, run


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


def test_the_tower_may_have_a_form_of_its_own() -> None:
    fp32, fp16 = PRECISIONS["fp32"], PRECISIONS["fp16"]
    assert chosen_forms(fp32, None, None, None).name == "fp32"
    assert chosen_forms(fp16, "int4", None, None).name == "int4, vision int8"
    assert chosen_forms(fp16, "int4", "fp16", 128).block_size == 128
    assert chosen_forms(fp32, "bf16", None, None).name == "bf16"
    assert chosen_forms(fp32, "int8", None, None).block_size is None


def test_forms_that_do_not_fit_are_rejected() -> None:
    for precision, *given, message in (
        ("fp16", "fp32", None, None, "--weights is fp32, but states are fp16."),
        ("fp16", None, "fp32", None, "--vision-weights is fp32, but states are fp16."),
        ("fp32", "int8", None, 64, "--block-size is 64, but no weights are int4."),
    ):
        with pytest.raises(UsageError, match=message):
            chosen_forms(PRECISIONS[precision], *given)


@pytest.mark.parametrize("option", ["--weights", "--vision-weights"])
def test_uint4_is_not_for_tensorrt(option: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
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
