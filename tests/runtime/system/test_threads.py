"""Threads and streams that share a pipeline get the answers that each gets alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import numpy as np
import pytest

from sinkprune import Pipeline
from sinkprune.contract.precision import Array
from sinkprune.runtime.backends import Backend, Engine, Tensor
from sinkprune.runtime.device.turns import Turns
from sinkprune.runtime.steps.answer import Answer

BACKENDS = ("ort-cpu", "openvino", "ort-cpu+openvino", "ort-cpu+openvino-prefill")
BUDGETS = ("none", "retain-128", "retain-64")
PICTURES, THREADS = 24, 4
TOKENS = 4


class Case(NamedTuple):
    picture: Array
    question: str
    budget: str


class Given(NamedTuple):
    """What must not depend on who else asks."""

    text: str
    tokens: list[int]
    layers: list[int]
    kept: list[int]


def given(answer: Answer) -> Given:
    return Given(answer.text, answer.token_ids, list(answer.tokens_per_layer), answer.kept.index.ravel().tolist())


def cases() -> list[Case]:
    random = np.random.default_rng(0)
    return [
        Case(
            random.integers(0, 256, (112, 112, 3), np.uint8),
            f"What is on the table number {number}{'?' * (number % 3)}",
            BUDGETS[number % len(BUDGETS)],
        )
        for number in range(PICTURES)
    ]


def ask(pipeline: Pipeline, case: Case) -> Given:
    return given(pipeline.generate(case.picture, case.question, budget=case.budget, max_new_tokens=TOKENS))


@pytest.fixture(scope="module", params=BACKENDS)
def shared(request: pytest.FixtureRequest, bundle: Callable[..., Path]) -> Pipeline:
    path = bundle("gqa-112", "fp32", BUDGETS[1:])
    return Pipeline.load(path, backend=request.param, threads=1, compute="fp32", check_sums=False)


@pytest.fixture(scope="module")
def alone(shared: Pipeline) -> list[Given]:
    """The answers of one thread; they differ from each other, or a mix-up could go unseen."""
    answers = [ask(shared, case) for case in cases()]
    assert len({tuple(answer.tokens) for answer in answers}) > PICTURES // 2
    return answers


@pytest.mark.parametrize("answers", [24, pytest.param(200, marks=pytest.mark.slow)])
def test_four_threads_get_the_answers_of_one(answers: int, shared: Pipeline, alone: list[Given]) -> None:
    questions = cases()

    def run(thread: int) -> list[int]:
        """The cases of this thread that were answered otherwise."""
        numbers = [(thread * 7 + number * 5) % PICTURES for number in range(answers)]
        return [number for number in numbers if ask(shared, questions[number]) != alone[number]]

    with ThreadPoolExecutor(THREADS) as pool:
        assert list(pool.map(run, range(THREADS))) == [[]] * THREADS


def stream(pipeline: Pipeline, case: Case) -> Iterator[Given]:
    """The stream of an answer; its last item is what was given."""
    answer = yield from pipeline.stream(  # type: ignore[misc]
        case.picture, case.question, budget=case.budget, max_new_tokens=TOKENS
    )
    yield given(answer)


def last(pieces: Iterator[object]) -> object:
    *_, found = pieces
    return found


def test_streams_that_take_turns_do_not_mix(shared: Pipeline, alone: list[Given]) -> None:
    first, second = (stream(shared, case) for case in cases()[:2])
    turns = [(next(first, None), next(second, None)) for _ in range(2 * TOKENS)]
    found = [[piece for piece in pieces if isinstance(piece, Given)] for pieces in zip(*turns, strict=True)]
    assert found == [[alone[0]], [alone[1]]]


@pytest.mark.parametrize("end", ["closed", "dropped", "kept"])
def test_a_stream_that_ends_early_leaves_the_others_alone(end: str, shared: Pipeline, alone: list[Given]) -> None:
    other, left = stream(shared, cases()[1]), stream(shared, cases()[2])
    next(other)
    next(left)
    if end == "closed":
        left.close()  # type: ignore[attr-defined]
    elif end == "dropped":
        del left
    assert ask(shared, cases()[0]) == alone[0]
    assert last(other) == alone[1]


def test_a_wrapped_engine_that_raises_leaves_the_pipeline_usable(bundle: Callable[..., Path]) -> None:
    """It raises in the middle of a step, where the turn is held."""
    broken = [False]

    def wrap(graph: str, engine: Engine, backend: Backend) -> Engine:
        def run(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
            if broken[0] and graph == "head":
                raise KeyError(graph)
            return engine(inputs)

        return run  # type: ignore[return-value]

    path = bundle("gqa-112", "fp32", BUDGETS[1:])
    pipeline = Pipeline.load(path, backend="openvino", compute="fp32", wrap=wrap)
    expected = ask(pipeline, cases()[0])
    broken[0] = True
    with pytest.raises(KeyError):
        ask(pipeline, cases()[0])
    broken[0] = False
    with ThreadPoolExecutor(1) as another:
        assert another.submit(ask, pipeline, cases()[0]).result(timeout=60) == expected


def test_a_plan_is_loaded_once_however_many_threads_ask_for_it(bundle: Callable[..., Path]) -> None:
    loaded = list[str]()

    def wrap(graph: str, engine: Engine, backend: Backend) -> Engine:
        loaded.append(graph)
        return engine

    pipeline = Pipeline.load(bundle("gqa-112", "fp32", BUDGETS[1:]), threads=1, wrap=wrap)
    case = cases()[1]
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
