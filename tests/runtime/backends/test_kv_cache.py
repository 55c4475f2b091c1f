"""KV caches: where their rows are, how they grow, and that requests reuse their memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from sinkprune import Pipeline
from sinkprune.runtime.backends.kv_cache import ROOM, HostBuffers, joined
from sinkprune.runtime.hooks import Observer
from sinkprune.runtime.steps.answer import Answer
from sinkprune.runtime.steps.decoding import KVCache, decode_one_token
from support.references.steps import QUESTION, ask, watched

Array = np.ndarray[Any, Any]
BUDGETS = ("retain-64", "retain-64+compact")
DIALECTS = ["opset24", "opset20"]


@st.composite
def parts_and_order(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any))
    pieces = draw(st.lists(st.tuples(st.integers(0, sum(lengths) - 1), st.integers(0, 6)), max_size=6))
    return lengths, [row for start, count in pieces for row in range(start, min(start + count, sum(lengths)))]


@given(parts_and_order())
def test_join_puts_every_row_where_it_belongs(case: tuple[list[int], list[int]]) -> None:
    lengths, order = case
    rows = np.arange(2 * sum(lengths)).reshape(-1, 2)
    parts = np.split(rows, np.cumsum(lengths)[:-1])
    np.testing.assert_array_equal(joined(parts, np.array(order, np.int64))[0], rows[order])
    # Rows of a picture come in groups.
    grouped = joined([rows[None], rows.reshape(sum(lengths), 1, 2)], np.array([0, sum(lengths)]), (1, 2, 2))
    np.testing.assert_array_equal(grouped[0], rows[[0, 0]])


@pytest.fixture(params=DIALECTS)
def pipe(request: pytest.FixtureRequest, bundle: Callable[..., Path]) -> Pipeline:
    return Pipeline.load(bundle("gqa-112", "fp32", BUDGETS, request.param), check_sums=False)


def buffers(cache: KVCache) -> list[tuple[int, Array]]:
    """The rows that are filled, and the buffer [1,Hkv,C,h] itself, of every layer's keys and values."""
    return [
        (segment.length, tensor.numpy())
        for segment in cache.segments
        for tensor in segment.buffers.values()  # type: ignore[attr-defined]
    ]


def step(pipe: Pipeline, cache: KVCache) -> Array:
    logits: Array = pipe.backend.numpy(decode_one_token(pipe.chain, cache, pipe.embedding([7])[0]))
    return logits


def test_a_token_binds_no_cache_again(
    bundle: Callable[..., Path], photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = Pipeline.load(bundle("gqa-112", "fp32", BUDGETS), backend="ort-cpu", check_sums=False)
    cache = watched(pipe, photo, QUESTION, budget="retain-64", max_new_tokens=1).prefill.cache
    step(pipe, cache)
    bind, bound = onnxruntime.IOBinding.bind_input, list[str]()

    def noted(self: Any, name: str, *given: Any) -> None:
        bound.append(name)
        bind(self, name, *given)

    monkeypatch.setattr(onnxruntime.IOBinding, "bind_input", noted)
    step(pipe, cache)
    assert not bound
    for _ in range(ROOM):
        step(pipe, cache)
    assert sorted(bound) == sorted(name for segment in cache.segments for name in segment.buffers)  # type: ignore[attr-defined]


@pytest.mark.parametrize("budget", ["none", "retain-64"])
def test_a_token_writes_its_row_alone_and_takes_room_in_the_midst_of_an_answer(
    budget: str, pipe: Pipeline, photo: Image.Image
) -> None:
    cache = watched(pipe, photo, QUESTION, budget=budget, max_new_tokens=1).prefill.cache
    rooms = [array.shape[2] for _, array in buffers(cache)]
    for _ in range(ROOM + 1):
        before = [(array, array[:, :, :length].copy()) for length, array in buffers(cache)]
        assert np.isfinite(step(pipe, cache)).all()
        for (length, array), (old, rows) in zip(buffers(cache), before, strict=True):
            assert array.ctypes.data == old.ctypes.data or array.shape[2] == old.shape[2] + ROOM
            np.testing.assert_array_equal(array[:, :, : length - 1], rows)
            assert array[:, :, length - 1].any() and not array[:, :, length:].any()
    assert all(array.shape[2] == room + ROOM for (_, array), room in zip(buffers(cache), rooms, strict=True))


def test_requests_take_turns_in_the_same_memory(pipe: Pipeline, photo: Image.Image) -> None:
    """However long they are: what a long one left behind serves a short one, and no other answer shows it."""

    class Addresses(Observer):
        seen: set[int]

        def answered(self, answer: Answer) -> None:
            # The buffers of a segment stand in one block.
            self.seen = {
                min(tensor.numpy().ctypes.data for tensor in segment.buffers.values())
                for segment in self.cache.segments
            }

        def prefilled(self, result: Any) -> None:
            self.cache = result.cache

    held = set[int]()
    for turn in range(6):
        for budget, tokens in (("none", 3), ("retain-64", 70), ("none", 70)):
            observer = Addresses()
            pipe.generate(
                photo, QUESTION, budget=budget, max_new_tokens=tokens, min_new_tokens=tokens, observer=observer
            )
            if turn < 3:
                held |= observer.seen
            assert observer.seen <= held
            del observer
    assert len(held) <= 3 * len(pipe.chain.segments)


def test_what_is_not_finite_in_one_answer_is_so_in_no_other(pipe: Pipeline, photo: Image.Image) -> None:
    _, first = ask(pipe, photo, "retain-64", 5)
    steps = watched(pipe, photo, QUESTION, budget="none", max_new_tokens=5)
    for _, array in buffers(steps.prefill.cache):
        array[:] = np.nan
    del steps, array
    _, second = ask(pipe, photo, "retain-64", 5)
    np.testing.assert_array_equal(first, second)


def test_a_buffer_is_lent_once_and_comes_back_with_its_last_view() -> None:
    pool = HostBuffers()
    first, second = pool.lend(1000), pool.lend(1000)
    addresses = {array.ctypes.data for array in (first, second)}
    assert len(addresses) == 2 and all(address % 64 == 0 for address in addresses)
    view = first[8:16].view(np.float32)
    del first
    third = pool.lend(10)
    assert third.ctypes.data not in addresses
    view[:] = 1
    del view
    assert {pool.lend(1000).ctypes.data} < addresses
    # The smallest block that fits is lent.
    pool, sizes = HostBuffers(), (100, 5000, 900)
    held = [pool.lend(size) for size in sizes]
    of = dict(zip(sizes, (array.ctypes.data for array in held), strict=True))
    del held
    lent = [pool.lend(size) for size in (800, 90, 4000)]
    assert [array.ctypes.data for array in lent] == [of[900], of[100], of[5000]]
