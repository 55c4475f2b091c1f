"""Backend ort-cuda against ort-cpu, on an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from PIL import Image

from sinkprune import Clip, Pipeline, Policy, Session
from sinkprune.runtime.steps.channel_order import ordered
from support.models.small_models import INTERNVL_SHAPES, NEXT_SHAPES, PI0_SHAPES, PI05_SHAPES, QWEN_SHAPES, SHAPES
from support.references.pi0 import INSTRUCTION
from support.references.same_answers import (
    assert_alike,
    assert_equal,
    assert_equal_at_both_ends,
    kept_sets,
    options_of,
)

BACKEND = "ort-cuda"
Bundles = Callable[..., Path]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        "CUDAExecutionProvider" not in onnxruntime.get_available_providers(),
        reason="this onnxruntime has no CUDA provider",
    ),
]


@pytest.mark.parametrize("dialect", ["opset24", "opset20"])
@pytest.mark.parametrize("name", [*SHAPES, *QWEN_SHAPES, *NEXT_SHAPES, *INTERNVL_SHAPES])
def test_in_fp32_it_keeps_and_answers_what_the_cpu_does(
    name: str, dialect: str, bundle: Bundles, pipeline: Callable[..., Pipeline], photo: Image.Image
) -> None:
    theirs, ours = pipeline(name), Pipeline.load(bundle(name, dialect=dialect), backend=BACKEND)
    assert_equal_at_both_ends(ours, theirs, photo)


@pytest.mark.parametrize("name", ["qwen3-vl", min(INTERNVL_SHAPES)])
def test_rows_of_clips_are_ordered_as_on_the_cpu(name: str, bundle: Bundles, photo: Image.Image) -> None:
    root = bundle(name, budgets=("prune-77.8",), max_frames=8)
    ours, theirs = (Pipeline.load(root, backend=backend) for backend in (BACKEND, "ort-cpu"))
    clip: Any = Clip([photo.rotate(30 * turn).resize((170, 140)) for turn in range(8)], fps=2)
    assert_equal_at_both_ends(ours, theirs, clip)


@pytest.mark.parametrize("size", [(640, 480), (1920, 1080), (300, 700)])
@pytest.mark.parametrize("name", ["gqa-112", "qwen", next(iter(NEXT_SHAPES))])
def test_frames_are_prepared_as_on_the_host(name: str, size: tuple[int, int], bundle: Bundles) -> None:
    model = Pipeline.load(bundle(name), backend=BACKEND)._model
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    given, torch = list[Any]([pixels]), pytest.importorskip("torch")
    if torch.cuda.is_available():
        given.append(torch.from_numpy(pixels).cuda())
    expected = model.family.inputs(Image.fromarray(pixels))
    for source in ordered(given, "rgb"):
        with model.chain.backend.turn:
            inputs: Any = model.tower_inputs(model.picture_of(source))
            found = inputs.prepared(model.chain.backend)
        for key, array in expected.items():
            np.testing.assert_array_equal(model.chain.backend.numpy(found[key]), array)


@pytest.mark.parametrize("form", ["fp16", "int8", "int4"])
def test_other_types_of_weights_change_little(
    form: str, bundle: Bundles, pipeline: Callable[..., Pipeline], photo: Image.Image
) -> None:
    precision, weights = options_of(form)
    root = bundle("gqa-112", precision, ("retain-64",), weights=weights)
    exact = Pipeline.load(bundle("gqa-112", "fp32", ("retain-64",), weights=weights), compute="fp32")
    assert_alike(Pipeline.load(root, backend=BACKEND), exact, photo)


@pytest.mark.parametrize("dialect", ["opset24", "opset20"])
def test_long_answers_and_sessions_equal_the_cpu_s_and_every_graph_is_captured(
    dialect: str, bundle: Bundles, pipeline: Callable[..., Pipeline], photo: Image.Image
) -> None:
    theirs, ours = pipeline("gqa-112"), Pipeline.load(bundle("gqa-112", dialect=dialect), backend=BACKEND)
    for turn in range(4):
        assert_equal_at_both_ends(ours, theirs, photo.rotate(turn))
    captured = ours.backend.captured()
    assert captured is not None and captured.bytes <= captured.most_bytes
    # Sanitizers run kernels.
    assert (captured.not_captured, captured.without_kernels) == ({}, {})
    assert all(counts["replayed"] for counts in captured.graphs.values())
    # Caches grow.
    for budget in ("none", "retain-64"):
        assert_equal(ours, theirs, photo, budget=budget, max_new_tokens=150, min_new_tokens=150)
    sessions, options = (Session(ours), Session(theirs)), {"max_new_tokens": 8, "min_new_tokens": 8}
    for question in ("What is this?", "What is on the left?"):
        found, wanted = (one.generate(photo, question, budget="retain-64", **options).token_ids for one in sessions)
        assert found == wanted


@pytest.mark.parametrize("dialect", ["opset24", "opset20"])
@pytest.mark.parametrize("name", [*PI0_SHAPES, *PI05_SHAPES])
def test_chunks_of_actions_equal_the_cpu_s(name: str, dialect: str, bundle: Bundles, photo: Image.Image) -> None:
    root = bundle(name, budgets=("prune-77.8",), max_images=2, dialect=dialect)
    ours, theirs = (Policy.load(root, backend=backend) for backend in (BACKEND, "ort-cpu"))
    state = np.zeros(len(theirs.facts.usual_state))
    # The first chunk of each budget captures the steps, the later ones replay them.
    for seed, budget in enumerate(("none", "prune-77.8") * 3):
        chunk, expected = (
            one.act([photo, photo if seed > 3 else None], INSTRUCTION, state + seed / 10, budget=budget, seed=seed)
            for one in (ours, theirs)
        )
        assert kept_sets(chunk) == kept_sets(expected)
        np.testing.assert_allclose(chunk.actions, expected.actions, atol=1e-3)


@pytest.mark.parametrize("form", ["fp16", "int8", "int4"])
def test_chunks_in_other_types_of_weights_are_captured_too(form: str, bundle: Bundles, photo: Image.Image) -> None:
    precision, weights = options_of(form)
    root = bundle("pi0-bare", precision, ("prune-77.8",), max_images=2, weights=weights)
    policy = Policy.load(root, backend=BACKEND)
    state = np.zeros(len(policy.facts.usual_state))
    # Kernel by kernel at first, then replayed.
    first, *others = (policy.act([photo, photo], INSTRUCTION, state, seed=0).actions for _ in range(3))
    for chunk in others:
        np.testing.assert_array_equal(chunk, first)


def test_threads_share_captured_steps(bundle: Bundles, photo: Image.Image) -> None:
    policy = Policy.load(bundle("pi0", budgets=("prune-77.8",), max_images=2), backend=BACKEND)
    state = np.zeros(len(policy.facts.usual_state))

    def act(seed: int) -> np.ndarray[Any, Any]:
        budget = ("none", "prune-77.8")[seed % 2]
        return policy.act([photo, photo], INSTRUCTION, state, budget=budget, seed=seed).actions

    expected = [act(seed) for seed in range(8)]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(3):
            for found, other in zip(threads.map(act, range(8)), expected, strict=True):
                np.testing.assert_allclose(found, other, atol=1e-5)
