"""A robot policy in the benchmark of peers: PyTorch and this project act on the same moment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

import peers
from peer_engines.checkpoint import chat_text, make_checkpoint
from peer_engines.engine import Question, engine
from peer_engines.robot import CAMERAS, largest_change, moment
from support.models.peer_shapes import PI0

QUESTION = Question(seed=3, side=56, text="What is there on the old chair?", new_tokens=4)


@pytest.fixture
def gradients() -> Iterator[None]:
    """The engine of PyTorch turns gradients off in its process."""
    yield
    torch.set_grad_enabled(True)


@pytest.mark.usefixtures("gradients")
def test_the_peer_and_this_project_change_the_same_action_most(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoint", PI0)
    found = {}
    for name, form_name in (("sinkprune", "ort-cpu fp32"), ("transformers", "fp32")):
        module = engine(name)
        form = next(form for form in module.forms(PI0) if form.name == form_name)
        module.prepare(form, tmp_path)
        loaded = module.load(form, tmp_path, 1)
        found[name] = [loaded.answer(Question(seed, 56, QUESTION.text, 4)) for seed in range(3)]
        assert loaded.decoder_bytes
    for ours, theirs in zip(found["sinkprune"], found["transformers"], strict=True):
        assert ours.tokens == theirs.tokens and ours.input_tokens == theirs.input_tokens
    for timings in found.values():
        shares = [
            (sum(timing.parts.values()) + QUESTION.new_tokens * timing.per_token) / timing.ttft for timing in timings
        ]
        # On a busy machine reading the frames may take longer than all parts.
        assert 0.3 < max(shares) <= 1.001


def test_the_peer_reads_the_words_of_this_projects_prompt(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, PI0)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    words = tokenizer.encode(chat_text(tmp_path, QUESTION.text, "")).ids
    assert words[0] == tokenizer.token_to_id("<bos>")
    assert tokenizer.decode(words) == f"{QUESTION.text}\n"
    assert tokenizer.token_to_id("<image>") not in words


def test_a_moment_is_the_same_for_all_engines_and_new_in_each_round() -> None:
    frames, state, noise = moment(QUESTION, 5, (6, 4))
    assert len(frames) == CAMERAS and state.shape == (5,) and noise.shape == (6, 4)
    again = moment(QUESTION, 5, (6, 4))
    assert all(map(np.array_equal, [*frames, state, noise], [*again[0], *again[1:]]))
    other = moment(Question(4, 56, QUESTION.text, 4), 5, (6, 4))
    shown = [frame.tobytes() for frame in (*frames, *other[0])]
    assert len(set(shown)) == 2 * CAMERAS and not np.array_equal(noise, other[2])


def test_the_largest_change_is_counted_from_the_noise() -> None:
    noise = np.array([[9.0, 0.0], [0.0, 1.0]])
    assert largest_change(noise + np.array([[0.1, 0.0], [-0.4, 0.3]]), noise) == [2]


def test_engines_that_run_no_policies_are_named() -> None:
    defaults = peers.DEFAULTS["pi0"]
    assert defaults.reference == "transformers bf16" and defaults.words.first == "TTFA"
    forms, not_run = peers.wanted_forms(PI0, None, defaults.reference)
    assert {form.engine for form in forms} == {"sinkprune", "transformers"}
    assert {"openvino-genai", "llama-cpp"} <= not_run.keys()
