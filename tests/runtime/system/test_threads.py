"""Threads and streams that share a pipeline get the answers that each gets alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from sinkprune import Pipeline, Stream
from sinkprune.contract.precision import Array
from sinkprune.runtime.backends import Backend, Engine, Tensor
from sinkprune.runtime.device.turns import Turns
from sinkprune.runtime.steps.answer import Answer

BACKENDS = ("ort-cpu", "openvino", "ort-cpu+openvino", "ort-cpu+openvino-prefill")
BUDGETS = ("none", "retain-128", "retain-64")
PICTURES, THREADS = 24, 4
TOKENS = 4


Case = tuple[Array, str, str]
"""A picture, a question and a budget."""
Given = tuple[list[int], list[int], list[int]]
"""Tokens, rows of each layer, and kept tokens: what must not depend on other requests."""


def given(answer: Answer) -> Given:
    return answer.token_ids, list(answer.tokens_per_layer), answer.kept.index.ravel().tolist()


def cases() -> list[Case]:
    random = np.random.default_rng(0)
    pictures = random.integers(0, 256, (PICTURES, 112, 112, 3), np.uint8)
    return [
        (picture, f"What is on the table number {number}{'?' * (number % 3)}", BUDGETS[number % len(BUDGETS)])
        for number, picture in enumerate(pictures)
    ]


def ask(pipeline: Pipeline, case: Case) -> Given:
    picture, question, budget = case
    return given(pipeline.generate(picture, question, budget=budget, max_new_tokens=TOKENS))


@pytest.fixture(scope="module", params=BACKENDS)
def shared(request: pytest.FixtureRequest, bundle: Callable[..., Path]) -> Pipeline:
    path = bundle("gqa-112", "fp32", BUDGETS[1:])
    return Pipeline.load(path, backend=request.param, threads=1, compute="fp32", check_sums=False)


@pytest.fixture(scope="module")
def alone(shared: Pipeline) -> list[Given]:
    """The answers of one thread; they differ from each other, or a mix-up could go unseen."""
    answers = [ask(shared, case) for case in cases()]
    assert len({tuple(tokens) for tokens, _, _ in answers}) > PICTURES // 2
    return answers


def test_four_threads_get_the_answers_of_one(shared: Pipeline, alone: list[Given]) -> None:
    questions = cases()

    def run(thread: int) -> list[int]:
        """The cases of this thread that were answered otherwise."""
        numbers = [(thread * 7 + number * 5) % PICTURES for number in range(PICTURES)]
        return [number for number in numbers if ask(shared, questions[number]) != alone[number]]

    with ThreadPoolExecutor(THREADS) as pool:
        assert list(pool.map(run, range(THREADS))) == [[]] * THREADS


def test_streams_that_take_turns_or_end_early_do_not_mix(shared: Pipeline, alone: list[Given]) -> None:
    def stream(number: int) -> Stream:
        picture, question, budget = cases()[number]
        return shared.stream(picture, question, budget=budget, max_new_tokens=TOKENS)

    first, second, closed, dropped, kept = map(stream, range(5))
    for left in (closed, dropped, kept):
        next(left)
    closed.close()
    del dropped
    for _ in range(2 * TOKENS):
        next(first, None)
        next(second, None)
    assert ask(shared, cases()[5]) == alone[5]
    assert [given(one.answer) for one in (first, second)] == alone[:2]
    assert given(kept.rest()) == alone[4]


def test_a_wrapped_engine_that_raises_leaves_the_pipeline_usable(bundle: Callable[..., Path]) -> None:
    """It raises in the middle of a step, where the turn is held."""
    broken = set[str]()

    def wrap(graph: str, engine: Engine, backend: Backend) -> Engine:
        def run(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
            if graph in broken:
                raise KeyError(graph)
            return engine(inputs)

        return run  # type: ignore[return-value]

    path, case = bundle("gqa-112", "fp32", BUDGETS[1:]), cases()[0]
    pipeline = Pipeline.load(path, backend="openvino", compute="fp32", wrap=wrap)
    expected = ask(pipeline, case)
    broken.add("head")
    with pytest.raises(KeyError):
        ask(pipeline, case)
    broken.clear()
    with ThreadPoolExecutor(1) as another:
        assert another.submit(ask, pipeline, case).result(timeout=60) == expected


def test_a_plan_is_loaded_once_however_many_threads_ask_for_it(bundle: Callable[..., Path]) -> None:
    loaded, case = list[str](), cases()[1]

    def wrap(graph: str, engine: Engine, backend: Backend) -> Engine:
        loaded.append(graph)
        return engine

    pipeline = Pipeline.load(bundle("gqa-112", "fp32", BUDGETS[1:]), threads=1, wrap=wrap)
    with ThreadPoolExecutor(THREADS) as pool:
        answers = list(pool.map(lambda _: ask(pipeline, case), range(THREADS)))
    assert answers == answers[:1] * THREADS
    assert len(loaded) == len(set(loaded))


def test_turns_are_taken_in_the_order_of_asking() -> None:
    turns, order, threads = Turns(), list[int](), list[Thread]()

    def take(number: int) -> None:
        with turns, turns:
            order.append(number)

    with turns:
        for number in range(THREADS):
            threads.append(Thread(target=take, args=[number]))
            threads[-1].start()
            while len(turns._waiting) <= number:
                pass
    # Asked for again at once, and yet behind all that wait.
    take(THREADS)
    for thread in threads:
        thread.join()
    assert order == list(range(THREADS + 1))
