"""Backend ort-cpu+openvino against ort-cpu and openvino: whose numbers each part has, and what it refuses."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import openvino
import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import BackendError, EnginesError
from sinkprune.contract.files.manifest_file import FileSpec
from sinkprune.contract.memory import running_need
from sinkprune.contract.schedule import schedule
from sinkprune.runtime.backends import load_backend
from sinkprune.runtime.backends.known import KNOWN
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.backends.openvino.backend import OpenVinoBackend
from sinkprune.runtime.families import load_family
from support.programs.commands import assert_refused, run
from support.references.same_answers import QUESTION, asked, assert_alike, assert_equal_at_both_ends, options_of

BACKEND = "ort-cpu+openvino"


@pytest.mark.parametrize("name", ["gqa-112", "next", "qwen", "qwen3-vl"])
def test_in_fp32_it_keeps_and_answers_what_onnxruntime_does(
    name: str, bundle: Callable[..., Path], pipeline: Callable[..., Pipeline], photo: Image.Image
) -> None:
    theirs, ours = pipeline(name), Pipeline.load(bundle(name), backend=BACKEND, compute="fp32")
    assert_equal_at_both_ends(ours, theirs, photo)


@pytest.mark.parametrize(
    "form", ["fp32", *(pytest.param(form, marks=pytest.mark.slow) for form in ("fp16", "int8")), "int4"]
)
def test_the_tower_is_openvino_s_to_the_bit_and_the_rest_nearby(
    form: str, bundle: Callable[..., Path], photo: Image.Image
) -> None:
    precision, weights = options_of(form)
    root = bundle("gqa-112", precision, ("retain-64",), weights=weights)
    ours, towers, decoders = (Pipeline.load(root, backend=name) for name in (BACKEND, "openvino", "ort-cpu"))
    (answer, _), (expected, _) = (asked(pipe, photo, budget="none") for pipe in (ours, towers))
    np.testing.assert_array_equal(answer.kept.norms, expected.kept.norms)
    np.testing.assert_array_equal(answer.kept.salience, expected.kept.salience)
    assert_alike(ours, decoders, photo)


def test_every_graph_but_the_tower_is_onnxruntime_s(
    bundle: Callable[..., Path], photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    compiled = OpenVinoBackend._compiled

    def noted(backend: OpenVinoBackend, model: Model) -> object:
        loaded.append(model.graph)
        return compiled(backend, model)

    monkeypatch.setattr(OpenVinoBackend, "_compiled", noted)
    pipeline = Pipeline.load(bundle("gqa-112"), backend=BACKEND)
    asked(pipeline, photo, budget="retain-64")
    assert loaded == ["vision"]


def test_reports_name_both_libraries() -> None:
    fast, exact = (load_backend(BACKEND, 1, compute=compute) for compute in ("fastest", "fp32"))
    tower = load_backend("openvino").compute
    assert fast.compute == f"the graphs' types, int8 where weights are; vision in {tower}"
    assert exact.compute == "the graphs' types; vision in fp32"
    assert [*fast.versions] == ["onnxruntime", "openvino"]
    assert (fast.name, fast.threads) == (BACKEND, 1)


def test_each_part_s_weights_are_counted_as_its_library_holds_them(bundle: Callable[..., Path]) -> None:
    manifest = read_bundle(bundle("gqa-112", weights="int4")).manifest
    # Of a language model that is larger than the tower, as all real ones are.
    largest = {"graphs/weights/decoder_3.bin": FileSpec(1 << 30, "")}
    manifest = replace(manifest, files={**manifest.files, **largest})
    assert (manifest.weights.vision, manifest.weights.decoder) == ("int8", "int4")
    layouts = [next(iter(load_family(manifest).largest().values()))]
    rows = schedule(manifest, "sinkpruner", "none", layouts)
    need, built = (
        running_need(manifest, KNOWN[BACKEND].memory, built=built, layouts=layouts, planned=rows, tokens=80)
        for built in (False, True)
    )
    bytes_of = {graph: manifest.weight_bytes(graph) for graph in manifest.graphs}
    vision = bytes_of.pop("vision")
    assert need.weights == pytest.approx(1.2 * sum(bytes_of.values()) + 2.2 * vision, rel=1e-6)
    assert not need.on_gpu
    # onnxruntime's engines are packed; the tower is packed when it is loaded.
    assert need.loading == round(0.9 * (1 << 30))
    assert built == replace(need, loading=round(0.3 * vision))


@pytest.fixture(scope="module")
def engines(bundle: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, folder = bundle("gqa-112", budgets=("retain-64",)), tmp_path_factory.mktemp("built") / "engines"
    outcome = run("sinkprune-build", root, "-o", folder, "--target", "onnxruntime+openvino")
    assert outcome.code == 0, outcome.stderr
    return folder


def test_its_engines_are_of_the_library_that_runs_each(engines: Path) -> None:
    names = {path.name for path in (engines / "engines").iterdir() if path.is_file()}
    assert {"vision.xml", "vision.bin", "projector.onnx", "decoder_0.onnx", "decoder_0.onnx.data"} <= names
    assert not {"vision.onnx", "decoder_0.xml"} & names


def test_other_engines_and_other_computing_are_refused(engines: Path, photo_file: Path) -> None:
    question = ("--image", photo_file, "--prompt", QUESTION)
    words = "built for target onnxruntime+openvino, backend 'ort-cpu' takes target onnxruntime."
    assert_refused(run("sinkprune-run", engines, "--backend", "ort-cpu", *question), words)
    assert_refused(run("sinkprune-run", engines, "--compute", "fp32", *question), "are built to be fastest")


@pytest.mark.parametrize("library", ["onnxruntime", "openvino"])
def test_engines_by_another_version_of_either_library_are_refused(
    library: str, engines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(library)
    version = f"{onnxruntime.__version__}+{openvino.__version__}"
    monkeypatch.setattr(module, "__version__", "0.1")
    with pytest.raises(EnginesError, match=rf"openvino {re.escape(version)}, .*0\.1.* is installed"):
        Pipeline.load(engines)


def test_without_openvino_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(BackendError, match=r"'ort-cpu\+openvino' needs openvino, and its import failed"):
        load_backend(BACKEND)
