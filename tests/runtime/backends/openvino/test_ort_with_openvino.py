"""Backend ort-cpu+openvino against ort-cpu and openvino: whose numbers each part has, and what it refuses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.errors import BackendError
from sinkprune.runtime.backends import load_backend
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.backends.openvino.backend import OpenVinoBackend
from support.programs.commands import assert_refused, run
from support.references.same_answers import QUESTION, asked, assert_alike, assert_equal_at_both_ends, options_of

BACKEND = "ort-cpu+openvino"


@pytest.mark.parametrize(
    "name", ["gqa-112", "gqa-112 of opset20", "next", "qwen", "qwen3-vl", "internvl", "paligemma"]
)
def test_in_fp32_it_keeps_and_answers_what_onnxruntime_does(
    name: str, bundle: Callable[..., Path], pipeline: Callable[..., Pipeline], photo: Image.Image
) -> None:
    name, _, dialect = name.partition(" of ")
    options = {"dialect": dialect} if dialect else {}
    theirs, ours = pipeline(name, **options), Pipeline.load(bundle(name, **options), backend=BACKEND, compute="fp32")
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


@pytest.fixture(scope="module")
def engines(bundle: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, folder = bundle("gqa-112", budgets=("retain-64",)), tmp_path_factory.mktemp("built") / "engines"
    outcome = run("sinkprune-build", root, "-o", folder, "--target", "onnxruntime+openvino")
    assert outcome.code == 0, outcome.stderr
    return folder


def test_other_engines_and_other_computing_are_refused(engines: Path, photo_file: Path) -> None:
    question = ("--image", photo_file, "--prompt", QUESTION)
    words = "built for target onnxruntime+openvino, backend 'ort-cpu' takes target onnxruntime."
    assert_refused(run("sinkprune-run", engines, "--backend", "ort-cpu", *question), words)
    assert_refused(run("sinkprune-run", engines, "--compute", "fp32", *question), "are built to be fastest")


def test_without_openvino_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(BackendError, match=r"'ort-cpu\+openvino' needs openvino, and its import failed"):
        load_backend(BACKEND)
