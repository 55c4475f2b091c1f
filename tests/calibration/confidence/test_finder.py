"""The finder of thresholds gives what trying everything gives, and its curve is not optimistic."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinkprune.calibration.confidence.finder import (
    MOST_STEPS,
    AskedQuestions,
    Steps,
    StepTimes,
    cross_validated,
    fastest,
    least_right,
    outcome,
)

MS = st.integers(1, 50).map(float)


@st.composite
def asked_questions(draw: st.DrawFn) -> AskedQuestions:
    budgets, questions = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    cells = budgets * questions
    right = np.array(draw(st.lists(st.booleans(), min_size=cells, max_size=cells))).reshape(questions, budgets)
    # Few values, so that ties occur; 1 is among them.
    sure = st.sampled_from([0.3, 0.5, 0.7, 0.9, 1.0])
    confidence = np.array(draw(st.lists(sure, min_size=cells, max_size=cells))).reshape(questions, budgets)
    times = []
    for _ in range(budgets):
        ladder = draw(st.sampled_from([None, 0, 1]))
        ttft, tower = draw(MS), draw(MS)
        resumed = draw(st.one_of(st.none(), MS)) if ladder is not None else None
        times.append(StepTimes(ttft + tower, tower, resumed, draw(st.sampled_from([0.0, 3.0])), ladder))
    pictures = np.array(draw(st.lists(st.integers(0, 4), min_size=questions, max_size=questions)))
    return AskedQuestions(right, confidence, pictures, tuple(times))


def simulated(asked: AskedQuestions, steps: Steps) -> tuple[int, float]:
    """Right answers and mean milliseconds, question by question."""
    right, total = 0, 0.0
    for answers, confidences in zip(asked.right.tolist(), asked.confidence.tolist(), strict=True):
        ladders: list[int | None] = []
        for number, budget in enumerate(steps.budgets):
            times = asked.times[budget]
            if number == 0:
                total += times.ttft_ms
            elif times.resumed_ms is not None and times.ladder in ladders:
                total += times.resumed_ms
            else:
                total += times.ttft_ms - times.tower_ms
            if number == len(steps.budgets) - 1 or confidences[budget] >= steps.least[number]:
                right += answers[budget]
                break
            total += times.passes_ms
            ladders.append(times.ladder)
    return right, total / len(asked.right)


def every_steps(asked: AskedQuestions) -> Iterator[Steps]:
    """All budgets in order, with all confidences that occur."""
    budgets = asked.right.shape[1]
    for count in range(1, MOST_STEPS + 1):
        for chosen in combinations(range(budgets), count):
            columns = [sorted(set(asked.confidence[:, budget].tolist())) for budget in chosen[:-1]]
            for least in product(*columns):
                yield Steps(chosen, least)


@given(asked_questions(), st.lists(st.integers(0, 13), min_size=1, max_size=3))
def test_the_fastest_is_that_of_trying_everything(asked: AskedQuestions, needed: list[int]) -> None:
    every = [simulated(asked, steps) for steps in every_steps(asked)]
    for least, found in zip(needed, fastest(asked, needed), strict=True):
        most = max(right for right, _ in every)
        enough = [(ms, -right) for right, ms in every if right >= min(least, most)]
        right, ms = simulated(asked, found)
        best_ms, best_right = min((round(ms, 6), right) for ms, right in enough)
        assert (round(ms, 6), -right) == (best_ms, best_right)


@given(asked_questions())
def test_an_outcome_is_that_of_each_question(asked: AskedQuestions) -> None:
    for steps in [*every_steps(asked)][:60]:
        found = outcome(asked, steps)
        right, ms = simulated(asked, steps)
        assert int(found.right.sum()) == right and found.mean_ms == pytest.approx(ms)
        assert found.last.max() < len(steps.budgets)


def test_thresholds_are_few_and_include_the_ends() -> None:
    rng = np.random.default_rng(0)
    confidence = rng.random((500, 2))
    asked = AskedQuestions(
        np.column_stack([confidence[:, 0] > 0.4, np.ones(500, bool)]),
        confidence,
        np.arange(500),
        (StepTimes(10, 2, None, 0), StepTimes(50, 2, None, 0)),
    )
    none_wrong, all_small = fastest(asked, [500, 0])
    # The least threshold of 20 that leaves out all wrong answers.
    assert none_wrong.budgets == (0, 1) and 0.4 < none_wrong.least[0] < 0.47
    assert none_wrong.least[0] in confidence[:, 0]
    assert all_small == Steps((0,), ())


def random_questions(rng: np.random.Generator, questions: int, budgets: int = 4) -> AskedQuestions:
    """Confidences that say nothing about answers: any gain from thresholds is luck."""
    right = rng.random((questions, budgets)) < 0.7
    times = tuple(StepTimes(10.0 * 2**number, 5, None, 0) for number in range(budgets))
    return AskedQuestions(right, rng.random((questions, budgets)), np.arange(questions) // 3, times)


def test_cross_validation_is_not_optimistic() -> None:
    """Where confidences are noise, thresholds look good on their own questions and not on others."""
    rng, own, held, unpruned = np.random.default_rng(1), list[float](), list[float](), list[float]()
    for _ in range(12):
        asked = random_questions(rng, 60)
        (steps,) = fastest(asked, [60])
        own.append(float(outcome(asked, steps).right.mean()))
        held.append(float(cross_validated(asked, [1.4], 5)[0].right.mean()))
        unpruned.append(0.7)
    assert np.mean(own) > 0.78
    assert abs(np.mean(held) - 0.7) < 0.04


def test_each_question_is_answered_with_thresholds_of_other_pictures() -> None:
    """Changing one picture's answers changes no threshold that its own questions are answered with."""
    rng = np.random.default_rng(2)
    asked = random_questions(rng, 45)
    before = cross_validated(asked, [1.0, 0.9], 5)
    picture = asked.pictures == 4
    wrong = asked.right.copy()
    wrong[picture] = ~wrong[picture]
    after = cross_validated(AskedQuestions(wrong, asked.confidence, asked.pictures, asked.times), [1.0, 0.9], 5)
    for old, new in zip(before, after, strict=True):
        assert (old.last[picture] == new.last[picture]).all()
        assert (old.right[picture] == ~new.right[picture]).all()


@pytest.mark.parametrize(("questions", "pictures"), [(1, 1), (2, 1), (7, 1), (7, 2)])
def test_few_questions(questions: int, pictures: int) -> None:
    asked = random_questions(np.random.default_rng(3), questions)
    asked = AskedQuestions(asked.right, asked.confidence, np.arange(questions) % pictures, asked.times)
    (found,) = cross_validated(asked, [0.9], 5)
    assert found.right.shape == (questions,) and found.mean_ms >= 10


def test_a_share_is_of_the_unpruned_right_answers() -> None:
    right: Any = np.zeros((20, 2), bool)
    right[:10, 1] = True
    asked = AskedQuestions(right, right.astype(float), np.arange(20), (StepTimes(1, 0, None, 0),) * 2)
    assert least_right(asked, [1.0, 0.99, 0.9, 0.85, 0.0]) == [10, 10, 9, 9, 0]
