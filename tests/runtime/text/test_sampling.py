"""The sampler: greedy, temperature and top-p, seeds, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkprune.contract.errors import NumericsError
from sinkprune.runtime.text.answer_tokens import Sampler

LOGITS = np.array([0.1, 2.0, -1.0, 1.5, 0.0, -3.0, 1.9], np.float32)


def softmax(logits: np.ndarray[Any, Any], temperature: float) -> np.ndarray[Any, Any]:
    scaled = np.exp(logits.astype(np.float64) / temperature)
    shares: np.ndarray[Any, Any] = scaled / scaled.sum()
    return shares


def shares_drawn(sampler: Sampler, logits: np.ndarray[Any, Any], draws: int = 10000) -> np.ndarray[Any, Any]:
    counts = np.bincount([sampler(logits) for _ in range(draws)], minlength=len(logits))
    shares: np.ndarray[Any, Any] = counts / draws
    return shares


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_greedy_ties_go_to_the_lower_id(dtype: Any) -> None:
    logits = np.zeros(1000, dtype)
    assert Sampler()(logits) == 0
    logits[[17, 400, 999]] = 5
    assert Sampler()(logits) == 17
    assert Sampler()(-np.arange(1000).astype(dtype)) == 0


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 2.5])
def test_draws_follow_the_softmax(temperature: float) -> None:
    drawn = shares_drawn(Sampler(temperature, seed=1), LOGITS)
    assert np.abs(drawn - softmax(LOGITS, temperature)).max() < 0.02


def test_top_p_draws_from_the_smallest_set_that_reaches_it() -> None:
    shares = softmax(LOGITS, 1.0)
    order = np.argsort(-shares)
    reached = np.cumsum(shares[order])
    for kept in range(1, len(LOGITS) + 1):
        top_p = float(reached[kept - 1]) - 1e-6
        drawn = shares_drawn(Sampler(1.0, top_p, seed=2), LOGITS, draws=2000)
        expected = np.zeros_like(shares)
        expected[order[:kept]] = shares[order[:kept]] / shares[order[:kept]].sum()
        assert set(np.flatnonzero(drawn)) <= set(order[:kept].tolist())
        assert np.abs(drawn - expected).max() < 0.04


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    def tokens(seed: int | None) -> list[int]:
        sampler = Sampler(1.0, 0.95, seed)
        return [sampler(LOGITS) for _ in range(100)]

    assert tokens(7) == tokens(7)
    assert tokens(7) != tokens(8)
    assert tokens(None) != tokens(None)


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e38])
def test_large_logits_do_not_overflow(scale: float) -> None:
    assert Sampler(1.0, seed=6)(np.array([-scale, scale, -scale], np.float32) * np.float32(3)) in (0, 1, 2)
    assert Sampler(1.0, seed=6)(np.array([0, 3e4, 0], np.float16)) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(bad: float, temperature: float) -> None:
    logits = LOGITS.copy()
    logits[4] = bad
    with pytest.raises(NumericsError, match="not finite") as caught:
        Sampler(temperature)(logits)
    assert "--precision fp32" in str(caught.value)


@given(
    logits=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=30),
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


def test_only_allowed_tokens_are_sampled() -> None:
    allowed = np.array([1, 0, 1, 1, 0, 1, 0], np.bool_)
    assert Sampler()(LOGITS, allowed) == 3
    assert Sampler()(np.zeros(7), allowed) == 0
    expected = np.where(allowed, softmax(LOGITS, 0.7), 0)
    drawer = Sampler(0.7, seed=5)
    drawn = np.bincount([drawer(LOGITS, allowed) for _ in range(5000)], minlength=7) / 5000
    assert np.abs(drawn - expected / expected.sum()).max() < 0.03
