"""A robot policy in the benchmark of peers: PyTorch and this project act on the same moment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from peer_engines.checkpoint import make_checkpoint
from peer_engines.engine import Question, engine
from support.models.peer_shapes import OFT, PI0

QUESTION = Question(seed=3, side=56, text="What is there on the old chair?", new_tokens=4)


@pytest.fixture
def gradients() -> Iterator[None]:
    """The engine of PyTorch turns gradients off in its process."""
    yield
    torch.set_grad_enabled(True)


@pytest.mark.usefixtures("gradients")
@pytest.mark.parametrize("config", [PI0, OFT], ids=["pi0", "openvla-oft"])
def test_the_peer_and_this_project_change_the_same_action_most(config: dict[str, Any], tmp_path: Path) -> None:
    steps = 1 if config is OFT else QUESTION.new_tokens
    make_checkpoint(tmp_path / "checkpoint", config)
    found = {}
    for name, form_name in (("sinkprune", "ort-cpu fp32"), ("transformers", "fp32")):
        module = engine(name)
        form = next(form for form in module.forms(config) if form.name == form_name)
        module.prepare(form, tmp_path)
        loaded = module.load(form, tmp_path, 1)
        found[name] = [loaded.answer(Question(seed, 56, QUESTION.text, steps)) for seed in range(3)]
        assert loaded.decoder_bytes
    for ours, theirs in zip(found["sinkprune"], found["transformers"], strict=True):
        assert ours.tokens == theirs.tokens and ours.input_tokens == theirs.input_tokens
    for timings in found.values():
        shares = [(sum(timing.parts.values()) + steps * timing.per_token) / timing.ttft for timing in timings]
        # On a busy machine reading the frames may take longer than all parts.
        assert 0.3 < max(shares) <= 1.001
