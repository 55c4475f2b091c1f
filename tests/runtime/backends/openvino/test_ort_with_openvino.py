"""Backends of both libraries against ort-cpu and openvino: whose numbers each part has, and what they refuse."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.errors import BackendError, EnginesError
from sinkprune.runtime.backends import known, load_backend
from sinkprune.runtime.backends.openvino.backend import OpenVinoBackend
from sinkprune.runtime.steps.decoding import decode_one_token
from support.programs.commands import assert_refused, run
from support.references.same_answers import QUESTION, asked, assert_alike, assert_equal_at_both_ends, options_of
from support.references.steps import watched

BACKEND, PREFILL = "ort-cpu+openvino", "ort-cpu+openvino-prefill"


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


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *product([BACKEND], ["gqa-112 of opset20", "qwen"]),
        *product([BACKEND, PREFILL], ["gqa-112", "next", "qwen3-vl", "internvl", "paligemma"]),
    ],
)
def test_in_fp32_it_keeps_and_answers_what_onnxruntime_does(
    backend: str, name: str, bundle: Callable[..., Path], pipeline: Callable[..., Pipeline], photo: Image.Image
) -> None:
    name, _, dialect = name.partition(" of ")
    options = {"dialect": dialect} if dialect else {}
    ours = Pipeline.load(bundle(name, **options), backend=backend, compute="fp32")
    assert_equal_at_both_ends(ours, pipeline(name, **options), photo)


@pytest.mark.parametrize("form", ["fp16", "int4"])
def test_rounded_forms_answer_nearly_the_same(form: str, bundle: Callable[..., Path], photo: Image.Image) -> None:
    precision, weights = options_of(form)
    root = bundle("gqa-112", precision, ("retain-64",), weights=weights)
    ours, theirs = (Pipeline.load(root, backend=name) for name in (PREFILL, "ort-cpu"))
    assert_alike(ours, theirs, photo)


def test_both_libraries_hold_the_rows_of_a_prompt_until_the_first_token(
    bundle: Callable[..., Path], photo: Image.Image
) -> None:
    ours = Pipeline.load(bundle("gqa-112"), backend=PREFILL)
    cache = watched(ours, photo, QUESTION, budget="retain-64", max_new_tokens=1).prefill.cache

    def check(decoder: Any, segment: Any, count: int) -> None:
        assert segment.length == segment.of_prompt.length == count
        states = decoder._prompts.keys_and_values(segment.of_prompt)
        assert {*states} == {*segment.of_tokens.buffers}
        for name, tensor in segment.of_tokens.buffers.items():
            buffer = tensor.numpy()
            assert states[name].shape[2] == count and buffer.any()
            np.testing.assert_array_equal(buffer[:, :, :count], states[name])
            assert not buffer[:, :, count:].any()

    for decoder, segment in zip(ours.chain.decoders, cache.segments, strict=True):
        check(decoder, segment, length := segment.length)
        check(decoder, decoder.restore(decoder.save(segment, length - 3), length - 3, length), length - 3)
    decode_one_token(ours.chain, cache, ours.embedding([7])[0])
    assert all(segment.of_prompt is None for segment in cache.segments)


def test_each_library_loads_its_graphs(bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    compiled = OpenVinoBackend._compiled
    monkeypatch.setattr(
        OpenVinoBackend, "_compiled", lambda self, model: (loaded.append(model.graph), compiled(self, model))[1]
    )
    Pipeline.load(bundle("gqa-112"), backend=BACKEND)
    assert loaded == ["vision"]
    loaded.clear()
    pipeline = Pipeline.load(bundle("gqa-112"), backend=PREFILL)
    decoders = [f"decoder_{segment}" for segment in range(len(pipeline.chain.segments))]
    assert loaded == ["vision", "projector", *decoders]
    assert "; tokens in the graphs' types" in pipeline.backend.compute


def test_what_the_prefill_does_not_take_is_refused(bundle: Callable[..., Path], engines: Path) -> None:
    with pytest.raises(BackendError, match="Export the bundle again with --dialect opset24"):
        Pipeline.load(bundle("gqa-112", dialect="opset20"), backend=PREFILL)
    with pytest.raises(EnginesError, match=r"hold one form of each decoder segment.* --backend ort-cpu\+openvino\.$"):
        Pipeline.load(engines, backend=PREFILL)


def test_both_forms_count_as_memory() -> None:
    both, first, second = (known.KNOWN[name].memory for name in (PREFILL, "openvino", "ort-cpu"))
    assert both and first and second
    for form, copies in both.decoder.copies.items():
        one, other = first.decoder.copies[form], second.decoder.copies[form]
        assert copies.held == one.held + other.held
        assert copies.loading == max(one.loading, other.loading)
