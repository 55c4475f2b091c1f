"""Weights: their places in their files, progress for each, and values that are not finite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from onnx.external_data_helper import ExternalDataInfo, uses_external_data
from safetensors.numpy import load_file, save_file

from sinkprune.contract.errors import CheckpointError
from sinkprune.contract.precision import Array
from sinkprune.export.weights import PRECISIONS
from support.programs.commands import assert_refused, run

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
