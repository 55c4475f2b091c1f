"""The TensorRT backend's own logic, without a GPU: the library and the device are fakes, the chain is the real one.

What is not seen here: TensorRT's numbers and speed, that it can be captured, and every call of the CUDA driver.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.bundle import Bundle, read_bundle
from sinkprune.contract.errors import BackendError
from sinkprune.runtime.backends.compatibility import BuiltEngines
from support.programs.slow_cases import each_once
from support.references.same_answers import assert_equal
from support.references.steps import QUESTION, ask
from support.stand_ins.fake_tensorrt import (
    ACTIVATIONS,
    FakeContext,
    FakeEngine,
    FakeRuntime,
    FakeTensorRTRTX,
    Rig,
    RuntimeConfig,
    build_fake_engines,
    rig_of,
)

NEW_TOKENS = 4
CAPTURED = 3
"""Calls of a decoder in an answer that is captured: with the second token, and twice with the third."""


@pytest.fixture(scope="module")
def small(bundle: Callable[..., Path]) -> Bundle:
    return read_bundle(bundle("gqa-112", "fp32", ("retain-64", "retain-64+compact")))


@pytest.fixture(scope="module")
def engines(small: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    build_fake_engines(small, folder)
    return folder


@pytest.fixture
def in_dialect(bundle: Callable[..., Path], tmp_path: Path) -> Callable[[str], Rig]:
    """A rig with engines of a bundle in a dialect."""

    budgets = ("retain-64", "retain-64+compact")
    return lambda dialect: rig_of(bundle("gqa-112", "fp32", budgets, dialect), tmp_path / dialect)


@pytest.mark.parametrize(("dialect", "has_graphs"), each_once(["opset24", "opset20"], [True, False]))
def test_answers_and_logits_are_those_of_onnxruntime(
    has_graphs: bool, dialect: str, in_dialect: Callable[[str], Rig], photo: Image.Image
) -> None:
    rig = in_dialect(dialect)
    rig.device.has_graphs = has_graphs
    reference = Pipeline.load(rig.pipeline.bundle.path, check_sums=False)
    # Budgets take turns, as in a robot's frames: eager, captured, replayed.
    for _ in range(3):
        for budget in ("none", "retain-64", "retain-64+compact"):
            assert_equal(rig.pipeline, reference, photo, tolerance=1e-5, budget=budget)
    assert ("replay" in rig.device.calls) == has_graphs


def test_an_engine_that_needs_more_activations_moves_them_and_outdates_the_graphs(
    small: Bundle, tmp_path: Path, photo: Image.Image
) -> None:
    larger = small.manifest.plan("sinkpruner", "retain-64+compact")
    assert larger is not None
    build_fake_engines(small, tmp_path, activations={**ACTIVATIONS, larger.graphs[-1]: 2 * max(ACTIVATIONS.values())})
    rig = Rig(small, tmp_path)
    for _ in range(2):
        ask(rig.pipeline, photo, "retain-64", NEW_TOKENS)
    rig.clear()
    _, before = ask(rig.pipeline, photo, "retain-64", NEW_TOKENS)
    assert rig.decode_calls() == {0}
    rig.clear()
    rig.pipeline.chain.load_plan(larger)
    _, after = ask(rig.pipeline, photo, "retain-64", NEW_TOKENS)
    assert rig.decode_calls() == {CAPTURED}
    np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("has_graphs", [True, False], ids=["graphs", "eager"])
def test_rtx_swaps_no_kernels_behind_captured_graphs(
    has_graphs: bool, small: Bundle, engines: Path, photo: Image.Image
) -> None:
    rig = Rig(small, engines, FakeTensorRTRTX, has_graphs=has_graphs)
    for _ in range(2):
        ask(rig.pipeline, photo, "retain-64", 1)
    strategies = [
        context.created_with.dynamic_shapes_kernel_specialization_strategy.name for context in rig.contexts("head")
    ]
    # Each captured graph has a context of its own.
    assert strategies == ["LAZY", "LAZY", *(["NONE"] if has_graphs else [])]


def test_the_fakes_know_no_name_that_the_library_lacks() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    for fake, real in (
        (FakeTensorRTRTX, trt),
        (FakeRuntime, trt.Runtime),
        (FakeEngine, trt.ICudaEngine),
        (FakeContext, trt.IExecutionContext),
        (RuntimeConfig, trt.IRuntimeConfig),
    ):
        ours = {"compute", "output_shapes", "strategy"}
        used = {name for name in dir(fake) if not name.startswith("_")} - ours
        assert used <= set(dir(real)), fake
    for place in (
        *("TensorIOMode.INPUT", "TensorLocation.DEVICE", "ExecutionContextAllocationStrategy.USER_MANAGED"),
        *("DynamicShapesKernelSpecializationStrategy.NONE", "ILogger.ERROR", "ICudaEngine.num_io_tensors"),
        "ICudaEngine.device_memory_size_v2",
    ):
        attrgetter(place)(trt)
    assert trt.nptype(trt.int64) is np.int64


@pytest.mark.parametrize("dialect", ["opset24", "opset20"])
def test_calls_are_captured_at_their_second_use_and_replayed_from_then_on(
    dialect: str, in_dialect: Callable[[str], Rig], photo: Image.Image
) -> None:
    """Whatever the length of the cache: one graph for a segment and the room of its cache."""
    rig = in_dialect(dialect)
    # A call that is captured is run, then recorded.
    for tokens, calls in ((2, 1), (2, 2), (NEW_TOKENS, 0), (12, 0)):
        ask(rig.pipeline, photo, "retain-64", tokens)
        assert rig.decode_calls() == {calls}
        assert rig.calls(0) == {calls}
        rig.clear()
    # Tokens before the third have the head's input at other addresses than later ones.
    for _ in range(3):
        rig.clear()
        ask(rig.pipeline, photo, "retain-64", NEW_TOKENS)
    assert rig.enqueued() == 0 and "begin_capture" not in rig.device.calls
    # A pass is the decoders and the head. Before the first are frames, tower, sanitizer, projector and select.
    assert rig.device.calls.count("replay") == NEW_TOKENS * (len(rig.decoders) + 1) + 5


@pytest.mark.parametrize(
    ("dialect", "prompt", "new_tokens", "said"),
    [
        ("opset24", "word " * 16, 4, r"'decoder_0'.*'hidden'.*'prefill'.*\[1, 124,.*--max-prompt"),
        ("opset24", QUESTION, 200, "193 rows.*192.*--max-prompt.*--max-new-tokens"),
        ("opset20", QUESTION, 200, r"'decoder_0'.*'past_\w+_0'.*320.*'decode'.*192.*--max-new-tokens"),
    ],
)
def test_shapes_beyond_an_optimisation_profile_are_refused(
    dialect: str,
    prompt: str,
    new_tokens: int,
    said: str,
    in_dialect: Callable[[str], Rig],
    photo: Image.Image,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where no limit of requests comes before."""
    monkeypatch.setattr(BuiltEngines, "limits", None)
    rig = in_dialect(dialect)
    with pytest.raises(BackendError, match=said):
        rig.pipeline.generate(photo, prompt, min_new_tokens=new_tokens, max_new_tokens=new_tokens)
