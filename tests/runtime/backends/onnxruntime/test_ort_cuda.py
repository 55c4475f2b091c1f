"""Backend ort-cuda without a GPU: the library and the device are stand-ins, backend and chain are the real ones.

What is not seen here: what CUDA can capture, and how fast it is. test_ort_cuda_gpu.py captures on a real GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import get_ident
from typing import Any

import numpy as np
import onnxruntime
import pytest
from PIL import Image

from sinkprune import Pipeline, Policy, Session
from sinkprune.contract.errors import BackendError
from sinkprune.runtime.backends.models import message_class
from sinkprune.runtime.backends.onnxruntime import cuda
from sinkprune.runtime.backends.onnxruntime.sizes_on_device import with_sizes_on_device
from sinkprune.runtime.backends.small_graphs import BEST, ELEMENT_TYPES, add_value
from sinkprune.runtime.device.captures import LEAST_BYTES
from sinkprune.runtime.hooks import Budgets
from sinkprune.runtime.processor import processor_name
from support.models.small_models import PI0_SHAPES, PI05_SHAPES
from support.references.pi0 import INSTRUCTION
from support.references.same_answers import assert_equal
from support.references.steps import QUESTION, ask
from support.stand_ins.fake_device import FakeDevice
from support.stand_ins.fake_ort_cuda import CudaRig, FakeOrtCuda, cuda_backend

BUDGETS = ("none", "retain-64")
DIALECTS = ["opset24", "opset20"]


@pytest.fixture
def rig(bundle: Callable[..., Path]) -> CudaRig:
    return CudaRig(bundle("gqa-112", budgets=BUDGETS[1:]))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_answers_are_those_of_the_cpu_run_captured_and_replayed(
    dialect: str, bundle: Callable[..., Path], photo: Image.Image
) -> None:
    root = bundle("gqa-112", budgets=BUDGETS[1:], dialect=dialect)
    rig, theirs = CudaRig(root), Pipeline.load(root, threads=1)
    ours = rig.pipeline()
    # Budgets take turns, and other pictures come: addresses hold other values.
    for turn in range(3):
        for budget in BUDGETS:
            assert_equal(ours, theirs, photo.rotate(turn), budget=budget)
    for _ in range(2):
        ask(ours, photo, "retain-64", 3)
    with rig.counted() as calls:
        ask(ours, photo, "retain-64", 3)
    assert calls["replayed graph"] == 5 + 3 * (len(ours.chain.decoders) + 1)
    assert "captured graph" not in calls and "allocate" not in calls
    assert rig.report.not_captured == {}


def test_every_graph_is_captured_at_its_second_use(rig: CudaRig, photo: Image.Image) -> None:
    ours = rig.pipeline()
    for named in ({}, {"captured graph"}, {"replayed graph"}, {"replayed graph"}):
        with rig.counted() as calls:
            ask(ours, photo, "retain-64", 1)
        assert calls.keys() & {"captured graph", "replayed graph"} == set(named)
    plan = rig.bundle.manifest.plan("sinkpruner", "retain-64")
    decoders = {f"decoder_{segment}" for segment in range(len(ours.chain.decoders))}
    assert plan and rig.report.graphs.keys() == {"frames", "vision", "projector", "head", *plan.graphs, *decoders}
    capturing = [session for session in rig.library.sessions if session.captures]
    assert {len(session.graphs) for session in capturing} == {1}
    # A capture without weights has a session with constant sizes.
    (select,) = (session for session in capturing if "visual_index" in session.types)
    assert all(isinstance(size, int) for value in select.get_inputs() for size in value.shape)


@pytest.mark.parametrize("timed", [False, True])
def test_a_budget_that_is_chosen_by_the_clock_is_chosen_when_the_tower_is_done(
    timed: bool, rig: CudaRig, photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = list[int]()
    own = Budgets.choose

    def choose(self: Budgets, *given: Any) -> Any:
        reads.append(rig.device.calls.count("copy_out"))
        return own(self, *given)

    monkeypatch.setattr(Budgets, "timed", timed)
    monkeypatch.setattr(Budgets, "choose", choose)
    ask(rig.pipeline(), photo, "retain-64", 1)
    assert reads == [2 if timed else 0]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(
    "logits",
    [[0, 3, 1], [3, 0, 3], [-1, -1, -2], [0.0, -0.0, -1], [-60000, -60001, -60002], [1, np.nan, 2], [-np.inf, 0, 1]],
    ids=str,
)
def test_the_best_token_is_found_on_the_device(dtype: type, logits: list[float]) -> None:
    device = FakeDevice()
    backend = cuda_backend(FakeOrtCuda(device))
    array = np.array([logits], dtype)
    for _ in range(4):
        device.calls.clear()
        index, finite = backend.best(backend.tensor(array))
        assert finite == np.isfinite(array).all()
        if finite:
            assert index == np.argmax(array)
    assert device.calls == ["copy_in", "replayed graph", "copy_out"]


def test_greedy_answers_leave_their_logits_on_the_device(rig: CudaRig, photo: Image.Image) -> None:
    ours, theirs = rig.pipeline(), Pipeline.load(rig.bundle, threads=1)
    found = dict[str, Any]()
    for options in ({}, {"temperature": 0.7, "seed": 1}, {"repetition_penalty": 1.3}, {"min_new_tokens": 6}):
        own, other = (pipe.generate(photo, "What?", max_new_tokens=6, **options) for pipe in (ours, theirs))
        assert own.token_ids == other.token_ids
        # Only the first answer is greedy and may have any token.
        assert found.setdefault(BEST, rig.report.graphs[BEST]) == rig.report.graphs[BEST]


def test_an_answer_keeps_its_shapes_however_long_it_is(rig: CudaRig, photo: Image.Image) -> None:
    ours, theirs = rig.pipeline(), Pipeline.load(rig.bundle, threads=1)
    # More tokens than a cache grows by at once.
    assert_equal(ours, theirs, photo, budget="retain-64", max_new_tokens=80, min_new_tokens=80)
    # The second token runs, the third is captured, all others are replayed.
    assert rig.report.graphs["decoder_0"] == {"captured": 1, "replayed": 77, "released": 0}


def test_a_session_captures_so_many_graphs_at_most(
    rig: CudaRig, photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_MOST_NUMBERS", 1)
    ours = rig.pipeline()
    for _ in range(3):
        ask(ours, photo, "retain-64", 2)
    # The prefill of each decoder is captured and replayed. Its tokens run as they are.
    assert rig.report.graphs["decoder_0"] == {"captured": 1, "replayed": 1, "released": 0}
    assert rig.report.not_captured["decoder_0"].startswith("1 sets of shapes")
    theirs = Pipeline.load(rig.bundle, threads=1)
    assert_equal(ours, theirs, photo, budget="retain-64")


@pytest.mark.parametrize("input_name", ["past_length", "visual_index"])
def test_a_graph_that_the_library_refuses_to_capture_runs_and_is_reported(
    input_name: str, bundle: Callable[..., Path], photo: Image.Image
) -> None:
    root = bundle("gqa-112", budgets=BUDGETS[1:])
    rig, theirs = CudaRig(root, lambda inputs: input_name in inputs), Pipeline.load(root, threads=1)
    ours = rig.pipeline()
    for _ in range(3):
        assert_equal(ours, theirs, photo, budget="retain-64")
    refused = rig.report.not_captured
    assert refused and all("cannot use the graph capture feature" in reason for reason in refused.values())
    assert not refused.keys() & rig.report.graphs.keys()


def test_reports_name_the_gpu_and_an_error_of_the_library_names_graph_and_shapes(rig: CudaRig) -> None:
    assert rig.backend.machine == f"FakeDevice, {processor_name()}"
    head, tensor = rig.pipeline().chain.last, rig.backend.tensor
    with pytest.raises(BackendError, match=r"graph 'head' failed in onnxruntime on hidden \[1, 2, 3\]: "):
        head({"hidden": tensor(np.zeros((1, 2, 3), np.float32))})


def test_threads_with_a_session_a_deadline_and_cancelled_streams_answer_as_alone(
    rig: CudaRig, photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = rig.pipeline(), Pipeline.load(rig.bundle, threads=1)
    with warnings.catch_warnings():
        # Other programs may keep this machine busy.
        warnings.simplefilter("ignore")
        ours.warm_up(photo, QUESTION, seconds=0.0)
    # Fewer than four threads use, so that graphs go while others are replayed.
    monkeypatch.setattr(rig.backend.captures, "_most", 40 * LEAST_BYTES)
    session, options = Session(ours), {"max_new_tokens": 4, "min_new_tokens": 4}

    def answers(seed: int) -> list[list[int]]:
        picture = pictures[seed % 2]
        stream = ours.stream(picture, QUESTION, budget="retain-64", max_new_tokens=9)
        next(iter(stream))
        of_session = session.generate(picture, QUESTION, budget="retain-64", **options)
        stream.cancel()
        in_time = ours.generate(picture, QUESTION, deadline_ms=1e6, **options)
        assert in_time.budget == "none" and in_time.deadline and in_time.deadline.met
        return [of_session.token_ids, in_time.token_ids]

    pictures = photo, photo.rotate(90)
    expected = [
        [theirs.generate(picture, QUESTION, budget=budget, **options).token_ids for budget in BUDGETS[::-1]]
        for picture in pictures
    ]
    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(answers, range(8))] == expected * 4
    report = rig.report
    assert report.bytes <= report.most_bytes and not rig.device.capturing
    assert sum(counts["replayed"] for counts in report.graphs.values())
    released = sum(counts["released"] for counts in report.graphs.values())
    # A session with weights stays, so it must free the graphs that go. The others are replaced.
    assert released and any(session.released for session in rig.library.sessions)
    held = sum(len(session.graphs) for session in rig.library.sessions if "visual_index" not in session.types)
    assert held <= 40 + released


@pytest.mark.parametrize("name", [min(PI0_SHAPES), min(PI05_SHAPES)])
def test_chunks_of_actions_are_those_of_the_cpu(name: str, bundle: Callable[..., Path], photo: Image.Image) -> None:
    rig = CudaRig(bundle(name, budgets=("prune-77.8",), max_images=2))
    ours, theirs = rig.policy(), Policy.load(rig.bundle, threads=1)

    def act(policy: Policy, seed: int, budget: str) -> np.ndarray[Any, Any]:
        state = np.random.default_rng(seed).uniform(-1, 1, len(policy.facts.usual_state))
        frames = [photo.rotate(seed), photo]
        return policy.act(frames, INSTRUCTION, state, budget=budget, seed=seed, steps=3).actions

    for seed in range(5):
        for budget in ("none", "prune-77.8"):
            np.testing.assert_allclose(act(ours, seed, budget), act(theirs, seed, budget), atol=1e-5)
    expert = rig.report.graphs["expert"]
    # The steps of a chunk lie at other addresses, those of the next chunk do not.
    assert expert == {"captured": 6, "replayed": 18, "released": 0}


def test_sessions_are_made_in_a_turn_and_all_backends_share_it(
    bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    rigs = [CudaRig(bundle("gqa-112", budgets=BUDGETS[1:])) for _ in range(2)]
    assert rigs[0].backend.turn is rigs[1].backend.turn
    own = rigs[0].library.InferenceSession

    def session(*given: Any, **named: Any) -> Any:
        # Another thread may capture meanwhile.
        assert rigs[0].backend.turn._holder == get_ident()  # type: ignore[attr-defined]
        return own(*given, **named)

    monkeypatch.setattr(rigs[0].library, "InferenceSession", session)
    rigs[0].pipeline()


def test_a_policy_s_sizes_are_made_on_the_gpu_and_other_graphs_are_left_as_they_are(
    bundle: Callable[..., Path],
) -> None:
    roots = bundle("gqa-112", budgets=BUDGETS[1:]), bundle(min(PI0_SHAPES), budgets=("prune-77.8",), max_images=2)
    changed = [
        {path.name for path in (root / "graphs").glob("*.onnx") if with_sizes_on_device(path.read_bytes())}
        for root in roots
    ]
    # Rows of a policy's prefix see all rows, so their masks compare with a size.
    assert changed[0] == set()
    assert changed[1] == {path.name for path in (roots[1] / "graphs").glob("decoder_*.onnx")}


def test_a_size_on_the_gpu_is_the_size() -> None:
    model = message_class("Model")(ir_version=8)
    model.opset_import.add(version=18)
    add_value(model.graph.input, "x", ELEMENT_TYPES["int64"], ("S",))
    add_value(model.graph.output, "y", ELEMENT_TYPES["int64"], ("S",))
    for operator, inputs, output in (("Size", ["x"], "size"), ("Max", ["x", "size"], "y")):
        model.graph.node.add(op_type=operator, input=inputs, output=[output], name=output)
    onnx = with_sizes_on_device(model.SerializeToString())
    session = onnxruntime.InferenceSession(onnx, providers=["CPUExecutionProvider"])
    for x in ([5, 0], [0], [1, 2, 3, 9]):
        np.testing.assert_array_equal(session.run(None, {"x": np.array(x)})[0], np.maximum(x, len(x)))
    assert "Range" in [node.op_type for node in message_class("Model").FromString(onnx).graph.node]
