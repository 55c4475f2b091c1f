"""What the host reads of a device during a request, on stand-ins that record it: nothing before the first logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune import Clip, Pipeline, Session
from sinkprune.contract.errors import NumericsError
from sinkprune.serving import sessions
from support.references.same_answers import assert_equal
from support.stand_ins.fake_device import FakeDevice
from support.stand_ins.fake_ort_cuda import CudaRig
from support.stand_ins.fake_tensorrt import rig_of

FAMILIES = {
    "gqa-112": "retain-64",
    "next": "retain-160",
    "qwen": "prune-77.8",
    "qwen3-vl": "prune-77.8",
    "internvl": "prune-77.8",
}
"""A small model of each family, and a budget."""
CLIPS = ("qwen", "qwen3-vl", "internvl")
"""Those that take clips: in one piece, with times between frames, with texts before frames."""


@pytest.fixture
def model(bundle: Callable[..., Path], tmp_path: Path) -> Callable[[str, str], tuple[Pipeline, FakeDevice, Pipeline]]:
    """Return a function of a backend and a model: the pipeline, its device, and the same on a CPU."""

    def make(backend: str, name: str) -> tuple[Pipeline, FakeDevice, Pipeline]:
        root = bundle(name, budgets=(FAMILIES[name],), **({"max_frames": 8} if name in CLIPS else {}))
        theirs = Pipeline.load(root, threads=1)
        if backend == "ort-cuda":
            rig = CudaRig(root)
            return rig.pipeline(), rig.device, theirs
        built = rig_of(root, tmp_path / "engines")
        return built.pipeline, built.device, theirs

    return make


@pytest.mark.parametrize("backend", ["ort-cuda", "tensorrt"])
@pytest.mark.parametrize(("name", "clip"), [*((name, False) for name in FAMILIES), *((name, True) for name in CLIPS)])
def test_the_host_reads_the_first_logits_then_two_numbers_for_each_token(
    name: str, clip: bool, backend: str, model: Callable[..., Any], photo: Image.Image
) -> None:
    ours, device, theirs = model(backend, name)
    turned = [photo.rotate(40 * turn).resize((170, 140)) for turn in range(5)]
    for budget in ("none", FAMILIES[name]):
        # Run, captured, replayed.
        for turn in range(3):
            seen = Clip(turned[turn : turn + 3], fps=2) if clip else turned[turn]
            assert_equal(ours, theirs, seen, budget=budget)
        device.reads.clear()
        device.calls.clear()
        answer = ours.generate(seen, "What is this?", budget=budget, max_new_tokens=3)
        assert answer.finish == "length"
        # Nor does the host wait before.
        assert "synchronize" not in device.calls[: device.calls.index("copy_out")]
        assert device.reads[0] == (1, ours.bundle.manifest.language_model.vocab_size)
        assert device.reads[-2:] == [(1, 2)] * 2 and device.reads.count((1, 2)) == 2


@pytest.mark.parametrize(("name", "reads"), [("pi0", [(1, 5, 4)]), ("pi0.5", [(1, 5, 4)]), ("openvla", [(1, 2)] * 7)])
def test_of_a_policy_the_host_reads_actions_or_their_tokens(
    name: str, reads: list[tuple[int, ...]], bundle: Callable[..., Path], photo: Image.Image
) -> None:
    rig = CudaRig(bundle(name, budgets=("prune-77.8",)))
    policy = rig.policy()
    policy.act([photo], "pick up the cup", np.zeros(len(policy.facts.usual_state)), budget="prune-77.8")
    assert rig.device.reads[: len(reads)] == reads


@pytest.mark.parametrize("name", ["gqa-112", "qwen"])
def test_a_session_reads_what_it_stores_after_the_first_logits(
    name: str, model: Callable[..., Any], photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The text before the picture is stored, short as it is.
    monkeypatch.setattr(sessions, "WORTH_FLOPS", 0)
    ours, device, theirs = model("ort-cuda", name)
    session, vocabulary = Session(ours), ours.bundle.manifest.language_model.vocab_size
    # New, about the same picture, about another: nothing, all rows and the first text are known.
    for picture, question in [(photo, "What?"), (photo, "How many cups are there?"), (photo.rotate(90), "What?")]:
        device.reads.clear()
        answer = session.generate(picture, question, budget=FAMILIES[name], max_new_tokens=3)
        assert device.reads[0] == (1, vocabulary)
        expected = theirs.generate(picture, question, budget=FAMILIES[name], max_new_tokens=3)
        assert answer.token_ids == expected.token_ids
        assert answer.reused_rows > 0 or question == "What?"


@pytest.mark.parametrize("what", ["norms", "tokens", "deepstack"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_features_that_are_not_finite_are_refused_after_the_first_logits(
    what: str, value: float, model: Callable[..., Any], photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, device, _ = model("ort-cuda", "qwen3-vl")
    vision, backend = ours.chain.vision, ours.backend

    def broken(inputs: Any) -> Any:
        outputs = vision(inputs)
        features = backend.numpy(outputs[what])
        # Of DeepStack's rows, the sanitizer drops some unread.
        features[0, slice(None) if what == "deepstack" else -1] = value
        device.reads.clear()
        return outputs | {what: backend.tensor(features)}

    monkeypatch.setattr(ours.chain, "vision", broken)
    named = {"norms": "norms or salience", "tokens": "tokens", "deepstack": "DeepStack features"}[what]
    for budget in ("none", FAMILIES["qwen3-vl"]):
        with pytest.raises(NumericsError, match=f"the vision tower gave {named} that are not finite"):
            ours.generate(photo, "What is this?", budget=budget, max_new_tokens=1)
        assert device.reads[0] == (1, ours.bundle.manifest.language_model.vocab_size)
