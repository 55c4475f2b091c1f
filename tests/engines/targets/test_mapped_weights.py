"""Engines for onnxruntime hold prepacked matrices, which are mapped, so that processes share them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sinkprune import Pipeline
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import BackendError
from sinkprune.contract.precision import WeightsName
from sinkprune.runtime.backends.compatibility import open_engines
from sinkprune.runtime.backends.models import Model
from support.programs.commands import run

FORMS: tuple[WeightsName, ...] = ("fp32", "int8", "int4")


@pytest.fixture(scope="module", params=FORMS)
def built(
    request: pytest.FixtureRequest, bundle: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A small bundle of each form that no other test loads, and its engines."""
    folder = tmp_path_factory.mktemp("mapped")
    path, engines = shutil.copytree(bundle("gqa-112", weights=request.param), folder / "bundle"), folder / "engines"
    outcome = run("sinkprune-build", path, "-o", engines, "--target", "onnxruntime")
    assert outcome.code == 0, outcome.stderr
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


def test_a_bundle_with_prepacked_matrices_is_refused(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Their layout cannot be checked, and kernels read a wrong one past its end."""
    path, engines = built
    opened = read_bundle(path)
    engine = open_engines(engines, opened).model("decoder_0")
    assert any(weight.packed for weight in engine.weights)
    prepacked = Model(engine.graph, engine.spec, engine.name, engine.folder, engine.weight_bytes)
    with pytest.raises(BackendError, match=r"as an engine library packed it, which only engines do.*export it again"):
        _ = prepacked.weights
