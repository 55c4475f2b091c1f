"""From logits to text: the sampler, penalties of repeated tokens, and stop strings, which are never shown."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.errors import NumericsError
from sinkprune.runtime.text.answer_tokens import Sampler, StopStrings
from sinkprune.runtime.text.penalties import Penalties

Pipelines = Callable[..., Pipeline]
QUESTION = "What is on the table?"
LOGITS = np.array([0.1, 2.0, -1.0, 1.5, 0.0, -3.0, 1.9], np.float32)


def softmax(logits: np.ndarray[Any, Any], temperature: float) -> np.ndarray[Any, Any]:
    scaled = np.exp(logits.astype(np.float64) / temperature)
    shares: np.ndarray[Any, Any] = scaled / scaled.sum()
    return shares


def shares_drawn(sampler: Sampler, draws: int = 10000, allowed: Any = None) -> np.ndarray[Any, Any]:
    counts = np.bincount([sampler(LOGITS, allowed) for _ in range(draws)], minlength=len(LOGITS))
    shares: np.ndarray[Any, Any] = counts / draws
    return shares


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_greedy_ties_go_to_the_lower_id(dtype: Any) -> None:
    logits = np.zeros(1000, dtype)
    assert Sampler()(logits) == 0
    logits[[17, 400, 999]] = 5
    assert Sampler()(logits) == 17
    assert Sampler()(-np.arange(1000).astype(dtype)) == 0


def test_draws_follow_the_softmax_of_the_allowed_tokens() -> None:
    for temperature in (0.3, 1.0, 2.5):
        drawn = shares_drawn(Sampler(temperature, seed=1))
        assert np.abs(drawn - softmax(LOGITS, temperature)).max() < 0.02
    allowed = np.array([1, 0, 1, 1, 0, 1, 0], np.bool_)
    assert Sampler()(LOGITS, allowed) == 3 and Sampler()(np.zeros(7), allowed) == 0
    expected = np.where(allowed, softmax(LOGITS, 0.7), 0)
    drawn = shares_drawn(Sampler(0.7, seed=5), 5000, allowed)
    assert np.abs(drawn - expected / expected.sum()).max() < 0.03


def test_top_p_draws_from_the_smallest_set_that_reaches_it() -> None:
    shares = softmax(LOGITS, 1.0)
    order = np.argsort(-shares)
    for kept in range(1, len(LOGITS) + 1):
        expected = np.where(np.isin(np.arange(len(LOGITS)), order[:kept]), shares, 0)
        drawn = shares_drawn(Sampler(1.0, float(expected.sum()) - 1e-6, seed=2), 2000)
        assert not drawn[expected == 0].any()
        assert np.abs(drawn - expected / expected.sum()).max() < 0.04


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    def tokens(seed: int | None) -> list[int]:
        sampler = Sampler(1.0, 0.95, seed)
        return [sampler(LOGITS) for _ in range(100)]

    assert tokens(7) == tokens(7)
    assert tokens(7) != tokens(8)
    assert tokens(None) != tokens(None)


def test_logits_that_are_not_finite_are_refused() -> None:
    for bad, temperature in product((np.nan, np.inf, -np.inf), (0.0, 1.0)):
        with pytest.raises(NumericsError, match=r"not finite.*--precision fp32"):
            Sampler(temperature)(np.where(np.arange(7) == 4, np.float32(bad), LOGITS))


@given(
    logits=st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=30),
    temperature=st.floats(0, 1e6),
    top_p=st.floats(0, 1, exclude_min=True),
    seed=st.integers(0, 2**64),
)
@settings(max_examples=200, deadline=None)
def test_any_finite_logits_give_a_token_of_the_vocabulary(
    logits: list[float], temperature: float, top_p: float, seed: int
) -> None:
    token = Sampler(temperature, top_p, seed)(np.array(logits, np.float32))
    assert 0 <= token < len(logits)


def lowered(logits: Any, prompt: set[int], answer: list[int], repetition: float, once: float, each: float) -> Any:
    """Return the logits with vLLM's three penalties, token by token."""
    logits = logits.astype(np.float32)
    for token in range(len(logits)):
        if token in prompt or token in answer:
            lower = logits[token] / np.float32(repetition)
            logits[token] = lower if logits[token] > 0 else logits[token] * np.float32(repetition)
        if token in answer:
            logits[token] -= np.float32(once + each * answer.count(token))
    return logits


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("repetition", "once", "each"), [(1.3, 0, 0), (0.6, -1, 0), (1, 0.4, 1.1), (2, -0.3, 0.9)])
def test_penalties_equal_loops(seed: int, repetition: float, once: float, each: float) -> None:
    random = np.random.default_rng(seed)
    # Tokens of padding may be outside the head's vocabulary.
    prompt, answer = {*random.integers(0, 60, 10).tolist(), 999}, list[int]()
    sampler = Sampler(penalties=Penalties(repetition, once, each, prompt))
    for _ in range(40):
        logits = random.normal(0, 6, 50).astype(np.float16)
        given = logits.copy()
        answer.append(sampler(logits))
        expected = lowered(logits, prompt, answer[:-1], repetition, once, each)
        assert answer[-1] == int(np.argmax(expected)) and (given == logits).all()
    assert len({*answer}) < 40


LETTERS = st.text("ab\n", max_size=12)


def whole(text: str, strings: list[str]) -> str:
    """`text` up to a string in it, found by adding one character after the other."""
    for end in range(1, len(text) + 1):
        found = [one for one in strings if text[:end].endswith(one)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@given(st.lists(LETTERS, max_size=8), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
def test_pieces_change_nothing(pieces: list[str], strings: list[str]) -> None:
    stop = StopStrings(strings)
    shown = ""
    for number, piece in enumerate(pieces):
        shown += stop.add(piece)
        so_far = "".join(pieces[: number + 1])
        # Nothing is shown that may have to be taken back, and all else is.
        assert so_far.startswith(shown)
        if not stop.found:
            held = so_far[len(shown) :]
            assert not held or any(one.startswith(held) and one != held for one in strings)
    shown += stop.end()
    text = "".join(pieces)
    assert shown == whole(text, strings)
    assert stop.found == any(one in text for one in strings)


def options(**more: Any) -> dict[str, Any]:
    return {"budget": "retain-64", "max_new_tokens": 24, "temperature": 1.5, "seed": 1, **more}


def test_an_answer_ends_before_a_string_of_several_tokens(pipeline: Pipelines, photo: Image.Image) -> None:
    pipe = pipeline("gqa-112")
    pieces = list(pipe.stream(photo, QUESTION, **options()))
    assert len(pieces) >= 5
    # The end of one piece, a whole one, and the beginning of the next
    string = pieces[1][-1] + pieces[2] + pieces[3][:1]
    text = "".join(pieces)
    assert text.index(string) == len("".join(pieces[:2])) - 1
    stream = pipe.stream(photo, QUESTION, **options(stop=("never", string)))
    heard = list(stream)
    assert "".join(heard) == stream.answer.text == text[: text.index(string)]
    assert stream.answer.finish == "stop" and all(heard) and 4 <= len(stream.answer.token_ids) < 24
    late = pipe.generate(photo, QUESTION, **options(stop=[string], min_new_tokens=24))
    assert late.text == pipe.generate(photo, QUESTION, **options(min_new_tokens=24)).text
