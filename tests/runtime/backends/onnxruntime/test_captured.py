"""Captured calls of the action expert: here on the CPU, which runs the same copies and captures nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import get_ident
from typing import Any

import numpy as np
import onnxruntime
import pytest
from PIL import Image

from sinkprune import Policy
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import BackendError
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.backends.onnxruntime import cuda
from sinkprune.runtime.backends.onnxruntime.backend import OrtBackend
from sinkprune.runtime.backends.onnxruntime.cuda import CUDA, CapturedEngine, OrtCudaBackend
from sinkprune.runtime.system import Turns
from support.models.small_models import PI0_SHAPES, PI05_SHAPES
from support.references.pi0 import INSTRUCTION

CPU = "CPUExecutionProvider"
BUDGETS = ("none", "prune-77.8")


class Backend(OrtBackend):
    """`ort-cpu`, whose repeated calls run as on a GPU."""

    def __init__(self) -> None:
        super().__init__("ort-cpu", 1, "fp32")
        self.turn = Turns()

    def load_repeated(self, model: Model) -> CapturedEngine:
        session, self.held = self._open(model, CPU)
        return CapturedEngine(self._ort, model, session, CPU, "cpu")


@pytest.fixture
def policies(bundle: Callable[..., Path]) -> Callable[[str], tuple[Policy, Policy]]:
    """A policy with such a backend, and the same with `ort-cpu`."""

    def load(name: str) -> tuple[Policy, Policy]:
        theirs = Policy.load(bundle(name, budgets=BUDGETS[1:], max_images=2), threads=1)
        return Policy(theirs.bundle, Backend()), theirs

    return load


def act(policy: Policy, photo: Image.Image, seed: int, budget: str, words: str = "") -> np.ndarray[Any, Any]:
    """A chunk for another state and noise for each seed, and another length of text with more words."""
    state = np.random.default_rng(seed).uniform(-1, 1, len(policy.facts.usual_state))
    frames = [photo.rotate(seed), None if seed % 2 else photo]
    return policy.act(frames, INSTRUCTION + words, state, budget=budget, seed=seed, steps=3).actions


@pytest.mark.parametrize("most", [cuda.MOST, 1, 0])
@pytest.mark.parametrize("name", [min(PI0_SHAPES), min(PI05_SHAPES)])
def test_chunks_are_the_same_whatever_came_before(
    name: str,
    most: int,
    policies: Callable[[str], tuple[Policy, Policy]],
    photo: Image.Image,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda, "MOST", most)
    ours, theirs = policies(name)
    for seed in range(3):
        for budget in BUDGETS:
            for words in ("", " and then put it back where it was before, next to all the others" * 5):
                found, expected = (act(policy, photo, seed, budget, words) for policy in (ours, theirs))
                np.testing.assert_array_equal(found, expected)
    engine = ours._model.chain.last
    assert isinstance(engine, CapturedEngine)
    assert len(engine._calls) <= most + 1


def test_steps_copy_what_changed_only(
    policies: Callable[[str], tuple[Policy, Policy]], photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    own = CapturedEngine._copy

    def copy(self: CapturedEngine, sources: Sequence[Any], targets: Sequence[Any] | None = None) -> list[Any]:
        counts.append(len(sources))
        return own(self, sources, targets)

    monkeypatch.setattr(CapturedEngine, "_copy", copy)
    ours, _ = policies("pi0")
    expert = ours.bundle.manifest.graphs["expert"]
    inputs, outputs = len(expert.inputs), len(expert.outputs)
    for _ in range(2):
        act(ours, photo, 0, "none")
    # All inputs of a chunk's first step; then the actions and their time.
    assert counts == [inputs, outputs, 2, outputs, 2, outputs] * 2


def test_threads_share_an_engine(policies: Callable[[str], tuple[Policy, Policy]], photo: Image.Image) -> None:
    ours, theirs = policies("pi0")
    expected = [act(theirs, photo, seed, BUDGETS[seed % 2]) for seed in range(4)]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(3):
            found = list(threads.map(lambda seed: act(ours, photo, seed, BUDGETS[seed % 2]), range(4)))
            for own, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(own, other)


def test_after_an_error_everything_is_copied_again(
    policies: Callable[[str], tuple[Policy, Policy]], photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The inputs of pi0.5 for a time live as long as the policy.
    ours, theirs = policies("pi0.5")
    engine = ours._model.chain.last
    assert isinstance(engine, CapturedEngine)

    class FailsInTheSecondStep:
        io_binding, run = engine._session.io_binding, iter([engine._session.run_with_iobinding])

        def run_with_iobinding(self, *given: Any) -> None:
            next(self.run, no_memory)(*given)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_session", FailsInTheSecondStep())
        with pytest.raises(
            BackendError, match=r"graph 'expert' failed in onnxruntime on .*actions \[1, .*: no memory\. If"
        ):
            act(ours, photo, 1, "none")
    for seed in (1, 0):
        np.testing.assert_array_equal(act(ours, photo, seed, "none"), act(theirs, photo, seed, "none"))


def test_on_a_gpu_only_the_expert_is_captured_and_all_backends_take_turns(
    bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU is a stand-in: sessions run on the CPU. test_ort_cuda_gpu.py captures on a real one."""
    asked: list[tuple[str, dict[str, str]]] = []
    real = onnxruntime.InferenceSession

    def session(path: str, options: Any, providers: list[tuple[str, dict[str, str]]], **_: Any) -> Any:
        asked.extend(providers)
        # Another thread may capture meanwhile.
        assert backend.turn._holder == get_ident()  # type: ignore[attr-defined]
        own = real(path, options, providers=[CPU])
        own.get_providers = lambda: [CUDA[0]]
        return own

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA[0]])
    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    monkeypatch.setattr(cuda, "load_cuda_libraries", lambda _: None)
    monkeypatch.setattr(cuda, "gpu_name", lambda: "a stand-in")
    backend, other = (OrtCudaBackend("ort-cuda", 1, "fastest") for _ in range(2))
    assert isinstance(backend.turn, Turns) and backend.turn is other.turn
    opened = read_bundle(bundle("pi0", budgets=BUDGETS[1:], max_images=2))
    backend.load(Model.of_bundle(opened, "vision"))
    assert isinstance(backend.load_repeated(Model.of_bundle(opened, "expert")), CapturedEngine)
    assert asked == [CUDA, (CUDA[0], {**CUDA[1], "enable_cuda_graph": "1"})]


def no_memory(*_: Any) -> None:
    raise RuntimeError("no memory")
