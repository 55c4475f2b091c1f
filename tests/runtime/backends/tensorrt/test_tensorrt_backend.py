"""The TensorRT backend's own logic, without a GPU: the library and the device are fakes, the chain is the real one.

What is not seen here: TensorRT's numbers and speed, that it can be captured, and every call of the CUDA driver.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.bundle import Bundle, read_bundle
from sinkprune.contract.errors import BackendError, PromptError
from sinkprune.contract.schedule import schedule
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.steps.chain import encode, run_tower
from sinkprune.runtime.steps.decoding import decode_one_token, prefill
from sinkprune.runtime.steps.prompt_rows import lay_out
from support.programs.slow_cases import each_once
from support.references.steps import QUESTION, ask
from support.stand_ins.fake_tensorrt import (
    ACTIVATIONS,
    LIMITS,
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
def rig(small: Bundle, engines: Path) -> Rig:
    return Rig(small, engines)


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
    budgets = ["none", "retain-64", "retain-64+compact"]
    expected = {budget: ask(reference, photo, budget, NEW_TOKENS) for budget in budgets}
    # Budgets take turns, as in a robot's frames: eager, captured, replayed.
    for turn in range(3):
        for budget in budgets:
            answer, logits = ask(rig.pipeline, photo, budget, NEW_TOKENS)
            wanted, wanted_logits = expected[budget]
            assert answer.token_ids == wanted.token_ids
            assert answer.tokens_per_layer == wanted.tokens_per_layer
            np.testing.assert_allclose(logits, wanted_logits, atol=1e-5, err_msg=f"{budget}, turn {turn}")
            np.testing.assert_array_equal(answer.kept.index, wanted.kept.index)
            for layer, places in wanted.kept.after_stage.items():
                np.testing.assert_array_equal(answer.kept.after_stage[layer], places)
    assert ("replay" in rig.device.calls) == has_graphs


def test_nothing_waits_between_embeddings_and_logits(rig: Rig, photo: Image.Image) -> None:
    pipeline, chain, clock = rig.pipeline, rig.pipeline.chain, Stopwatch(rig.backend)
    inputs, layout = pipeline.family.inputs(photo), pipeline.family.layout(photo)
    planned = schedule(pipeline.bundle.manifest, "sinkpruner", "retain-64", [layout])
    assert planned.plan is not None and len(planned.plan.select_after) == 1
    encoded = encode(chain, planned.plan, run_tower(chain, inputs, clock), clock)
    rig.clear()
    texts = [list(range(10)), list(range(20))]
    rows = lay_out(chain.backend, pipeline.embedding, None, texts, [layout], [encoded], pruned=True)
    result = prefill(chain, planned, rows, clock)
    # The host goes on at once: it may change what it handed over.
    rows.visual[:] = rows.text[:] = 0
    for row in np.ones((3, chain.model.hidden_size), chain.dtype):
        logits = decode_one_token(chain, result.cache, row)
    assert rig.device.waits == 0
    assert np.isfinite(rig.backend.numpy(logits)).all()
    assert rig.device.waits == 1
    assert clock.ms()["prefill"] > clock.ms()["select"] > 0


@pytest.mark.parametrize(
    ("prompt", "new_tokens", "flag", "most"),
    [
        ("word " * 80, 4, "--max-prompt", LIMITS.prompt_tokens),
        (QUESTION, LIMITS.new_tokens + 1, "--max-new-tokens 31", LIMITS.new_tokens),
    ],
)
def test_a_request_beyond_the_limits_names_limit_and_flag(
    prompt: str, new_tokens: int, flag: str, most: int, rig: Rig, photo: Image.Image
) -> None:
    assert rig.pipeline.new_request(photo, QUESTION).max_new_tokens == LIMITS.new_tokens
    with pytest.raises(PromptError, match=f"the {most} the engines were built for.*{flag}"):
        rig.pipeline.generate(photo, prompt, max_new_tokens=new_tokens)
    assert rig.enqueued() == 0


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
    for enumeration, names in (
        ("TensorIOMode", ["INPUT"]),
        ("TensorLocation", ["DEVICE"]),
        ("ExecutionContextAllocationStrategy", ["USER_MANAGED"]),
        ("DynamicShapesKernelSpecializationStrategy", ["NONE"]),
        ("ILogger", ["ERROR"]),
    ):
        assert set(names) <= set(dir(getattr(trt, enumeration)))
    assert hasattr(trt.ICudaEngine, "device_memory_size_v2") and hasattr(trt.ICudaEngine, "num_io_tensors")
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


def test_what_differs_in_a_shape_or_an_address_is_not_replayed(
    in_dialect: Callable[[str], Rig], photo: Image.Image
) -> None:
    rig = in_dialect("opset20")
    for _ in range(2):
        ask(rig.pipeline, photo, "retain-64", NEW_TOKENS)
    rig.clear()
    # Another budget has caches of other rooms.
    ask(rig.pipeline, photo, "none", NEW_TOKENS)
    assert rig.decode_calls() == {CAPTURED}
    rig.clear()
    # Somebody holds a tensor of the size of a token's hidden state: later ones lie elsewhere.
    model, dtype = rig.pipeline.chain.model, rig.pipeline.chain.dtype
    held = rig.backend.tensor(np.zeros((1, 1, model.hidden_size), dtype))
    ask(rig.pipeline, photo, "retain-64", NEW_TOKENS)
    assert rig.decode_calls() == {CAPTURED}
    del held
    rig.clear()
    ask(rig.pipeline, photo, "retain-64", NEW_TOKENS)
    assert rig.decode_calls() == {0}


@pytest.mark.parametrize(
    ("dialect", "rows", "past", "said"),
    [
        ("opset24", 125, 0, r"'decoder_0'.*'hidden'.*\[1, 125,.*'prefill'.*\[1, 124,.*--max-prompt"),
        ("opset24", 1, 192, "193 rows.*192.*--max-prompt.*--max-new-tokens"),
        ("opset20", 1, 193, r"'decoder_0'.*'past_\w+_0'.*256.*'decode'.*192.*--max-new-tokens"),
    ],
)
def test_shapes_beyond_an_optimisation_profile_are_refused(
    dialect: str, rows: int, past: int, said: str, in_dialect: Callable[[str], Rig]
) -> None:
    rig = in_dialect(dialect)
    with pytest.raises(BackendError, match=said):
        run_decoder(rig, rows, past)
    assert rig.enqueued() == 0


def run_decoder(rig: Rig, rows: int, past: int) -> dict[str, Any]:
    chain = rig.pipeline.chain
    model, tensor = chain.model, rig.backend.tensor
    cache = chain.decoders[0].new_cache()

    def call(rows: int) -> dict[str, Any]:
        table = np.zeros((1, rows, model.head_dim // 2), chain.dtype)
        hidden = tensor(np.zeros((1, rows, model.hidden_size), chain.dtype))
        return chain.decoders[0]({"hidden": hidden, "cos": tensor(table), "sin": tensor(table)}, cache)

    if past:
        call(min(past, 124))
    while cache.length < past:
        call(1)
    rig.clear()
    return call(rows)
