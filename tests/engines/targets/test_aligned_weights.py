"""Prepacked weights are moved only in the form and the versions of onnxruntime that were tried."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import BackendError, EnginesError
from sinkprune.contract.precision import WeightsName
from sinkprune.engines.targets import onnxruntime as onnxruntime_target
from sinkprune.engines.targets.onnxruntime import align_weights, takes_prepacked
from sinkprune.runtime.backends.compatibility import open_engines
from sinkprune.runtime.backends.models import Model
from support.programs.commands import succeed
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
        ("prepacked_0", "MatMul+1"),
        ("prepacked_0", "MatMul+1|300;101;0"),
        ("prepacked_blob", "MatMul+1|100;100;0"),
    ],
)
def test_another_form_is_refused_and_nothing_is_written(key: str, value: str, tmp_path: Path) -> None:
    file = model(tmp_path, key, value)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(EnginesError, match=r"'w' of 'm\.onnx' in an unknown form.*expected NAME\|OFFSET;LENGTH;0"):
        align_weights(file)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_version_that_was_never_tried_builds_engines_without_prepacked_weights(
    bundle: Callable[..., Path], photo: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert takes_prepacked(onnxruntime.__version__)
    assert not any(map(takes_prepacked, ("1.30.1", "1.33.0", "2.32.0", "1.310.0", "nightly")))
    monkeypatch.setattr(onnxruntime_target, "PREPACKED_IN", ((1, 1),))
    path = bundle("gqa-112", weights="int4")
    outcome = succeed("sinkprune-build", path, "-o", tmp_path / "engines", "--target", "onnxruntime")
    assert outcome.stderr.count("was never tried with prepacked weights") == 1
    engines = open_engines(tmp_path / "engines", read_bundle(path))
    assert not any(weight.packed for graph in ("decoder_0", "vision") for weight in engines.model(graph).weights)
    assert_equal_at_both_ends(Pipeline.load(tmp_path / "engines"), Pipeline.load(path), photo)


FORMS: tuple[WeightsName, ...] = ("fp32", "int8", "int4")


@pytest.fixture(scope="module", params=FORMS)
def built(
    request: pytest.FixtureRequest, bundle: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A small bundle of each form that no other test loads, and its engines."""
    folder = tmp_path_factory.mktemp("mapped")
    path, engines = shutil.copytree(bundle("gqa-112", weights=request.param), folder / "bundle"), folder / "engines"
    succeed("sinkprune-build", path, "-o", engines, "--target", "onnxruntime")
    return path, engines


def mapped(folder: Path) -> set[str]:
    """Return the names of the files of `folder` that are mapped into this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {Path(line.split(maxsplit=5)[5]).name for line in lines if str(folder) in line}


def test_engines_are_mapped_and_bundles_are_not(built: tuple[Path, Path]) -> None:
    path, engines = built
    from_bundle = Pipeline.load(path)
    # A process that does not map a file survives its truncation.
    assert mapped(path) == set()
    from_engines = Pipeline.load(path, engines=engines)
    assert {"vision.onnx.data", "decoder_0.onnx.data", "head.onnx.data"} <= mapped(engines)
    assert from_bundle.bundle.sha256 == from_engines.bundle.sha256
    # A bundle's prepacked weights are refused: a layout cannot be checked, and kernels read a wrong one past its end.
    engine = open_engines(engines, read_bundle(path)).model("decoder_0")
    assert any(weight.packed for weight in engine.weights)
    prepacked = Model(engine.graph, engine.spec, engine.name, engine.folder, engine.weight_bytes)
    with pytest.raises(BackendError, match=r"as an engine library packed it, which only engines do.*export it again"):
        _ = prepacked.weights
