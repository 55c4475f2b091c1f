"""Prepacked weights are moved only in the form and the versions of onnxruntime that were tried."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import EnginesError
from sinkprune.engines.targets import onnxruntime as onnxruntime_target
from sinkprune.engines.targets.onnxruntime import align_weights, takes_prepacked
from sinkprune.runtime.backends.compatibility import open_engines
from support.programs.commands import run
from support.references.same_answers import assert_equal_at_both_ends


def model(folder: Path, key: str = "prepacked_0", value: str = "MatMul+1|100;100;0|300;50;0") -> Path:
    """Write a model of one weight, with one entry for its prepacked forms, and 400 bytes of data."""
    tensor = onnx.TensorProto(name="w", dims=[25], data_type=1, data_location=onnx.TensorProto.EXTERNAL)
    for name, content in {"location": "m.onnx.data", "offset": "0", "length": "100", key: value}.items():
        tensor.external_data.add(key=name, value=content)
    graph = onnx.GraphProto(name="g", initializer=[tensor])
    onnx.save(onnx.ModelProto(ir_version=10, graph=graph), folder / "m.onnx")
    (folder / "m.onnx.data").write_bytes(bytes(range(200)) * 2)
    return folder / "m.onnx"


def test_every_piece_is_moved_to_a_page(tmp_path: Path) -> None:
    file = model(tmp_path)
    align_weights(file)
    (tensor,) = onnx.load(file, load_external_data=False).graph.initializer
    entries = {entry.key: entry.value for entry in tensor.external_data}
    assert entries["prepacked_0"] == "MatMul+1|4096;100;0|8192;50;0"
    data = (tmp_path / "m.onnx.data").read_bytes()
    assert data[:100] == bytes(range(100))
    assert data[4096:4196] == bytes(range(100, 200))
    assert data[8192:8242] == bytes(range(100, 150))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("prepacked_0", "MatMul+1|100;100"),
        ("prepacked_0", "MatMul+1|100;100;9f3c"),
        ("prepacked_0", "MatMul+1|100;100;0;64"),
        ("prepacked_0", "MatMul+1|100:100:0"),
        ("prepacked_0", "MatMul+1"),
        ("prepacked_0", "MatMul+1|300;101;0"),
        ("prepacked_blob", "MatMul+1|100;100;0"),
        ("packed", "MatMul+1|100;100;0"),
    ],
)
def test_another_form_is_refused_and_nothing_is_written(key: str, value: str, tmp_path: Path) -> None:
    file = model(tmp_path, key, value)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(EnginesError, match=r"'w' of 'm\.onnx' in an unknown form.*expected NAME\|OFFSET;LENGTH;0"):
        align_weights(file)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_installed_version_was_tried_and_others_were_not() -> None:
    assert takes_prepacked(onnxruntime.__version__)
    assert not any(map(takes_prepacked, ("1.30.1", "1.33.0", "2.32.0", "1.310.0", "nightly")))


def test_a_version_that_was_never_tried_builds_engines_without_prepacked_weights(
    bundle: Callable[..., Path], photo: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime_target, "PREPACKED_IN", ((1, 1),))
    path = bundle("gqa-112", weights="int4")
    outcome = run("sinkprune-build", path, "-o", tmp_path / "engines", "--target", "onnxruntime")
    assert outcome.code == 0
    assert outcome.stderr.count("was never tried with prepacked weights") == 1
    engines = open_engines(tmp_path / "engines", read_bundle(path))
    assert not any(weight.packed for graph in ("decoder_0", "vision") for weight in engines.model(graph).weights)
    assert_equal_at_both_ends(Pipeline.load(tmp_path / "engines"), Pipeline.load(path), photo)
