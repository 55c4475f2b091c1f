"""Weights: their places in their files, progress for each, and values that are not finite."""

from __future__ import annotations

import shutil
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
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.precision import PRECISIONS
from sinkprune.export.source import ExportRequest
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


def test_every_weight_is_reported(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    reported: dict[str, float] = {}

    def progress(what: str, done: float, total: float, unit: str) -> None:
        reported[what] = done

    request = ExportRequest(str(checkpoint("gqa-112")), budgets=("retain-64",))
    manifest = export_bundle(request, tmp_path / "out", progress=progress)
    written = manifest.language_model.vocab_size * manifest.language_model.hidden_size
    for name in (name for name in manifest.graphs if "/" not in name):
        tensors = onnx.load(tmp_path / "out/graphs" / f"{name}.onnx", load_external_data=False).graph.initializer
        written += sum(int(np.prod(tensor.dims)) for tensor in tensors if uses_external_data(tensor))
    assert reported["exporting"] * 1e6 == pytest.approx(written)


EMBEDDING = "language_model.embed_tokens.weight"
DOWN = "language_model.layers.3.mlp.down_proj.weight"
KEYS = "language_model.layers.3.self_attn.k_proj.weight"


NOT_FINITE = [
    (np.nan, "fp32", "holds NaN or infinity, expected finite numbers"),
    (-np.inf, "fp32", "holds NaN or infinity"),
    (np.nan, "fp16", "holds NaN or infinity"),
    (-7e4, "fp16", "holds values up to 7e+04, expected at most 65504, as fp16 can hold. Export with --precision"),
    (1e38, "fp16", "holds values up to 1e+38"),
]


@pytest.mark.parametrize(
    ("name", "value", "precision", "message"),
    [
        *((DOWN, *case) for case in NOT_FINITE),
        *((name, *NOT_FINITE[place]) for name in (EMBEDDING, KEYS) for place in (0, 3)),
    ],
)
def test_a_weight_that_is_not_finite_is_named(
    name: str, value: float, precision: str, message: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    # Its embedding table is not its head, too.
    folder = Path(shutil.copytree(checkpoint("mha-336"), tmp_path / "checkpoint"))
    tensors = load_file(folder / "model.safetensors")
    stored = next(stored for stored in tensors if stored.endswith(name.removeprefix("language_model.")))
    tensors[stored][-1, -1] = value
    save_file(tensors, folder / "model.safetensors")
    outcome = run("sinkprune-export", folder, "-o", tmp_path / "out", "--precision", precision)
    assert_refused(outcome, f"tensor '{name}'", message)
    assert not (tmp_path / "out").exists()


def test_a_finite_weight_may_be_as_large_as_fp32_has_room_for(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint("gqa-112"), tmp_path / "checkpoint"))
    tensors = load_file(folder / "model.safetensors")
    stored = next(stored for stored in tensors if stored.endswith("down_proj.weight"))
    tensors[stored][0, 0] = 3.4e38
    save_file(tensors, folder / "model.safetensors")
    assert run("sinkprune-export", folder, "-o", tmp_path / "out").code == 0


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


def test_the_last_of_many_values_is_looked_at() -> None:
    for count in (1 << 16, (1 << 17) + 1):
        array = np.zeros(count, np.float32)
        assert PRECISIONS["fp32"].converted("w", array) is array
        array[-1] = np.inf
        with pytest.raises(CheckpointError, match="NaN or infinity"):
            PRECISIONS["fp32"].converted("w", array)
