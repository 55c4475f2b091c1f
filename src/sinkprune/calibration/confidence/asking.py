"""Asks questions with a closed list at every budget, and measures the steps of budget `auto`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from sinkprune.calibration.confidence.finder import AskedQuestions, StepTimes
from sinkprune.calibration.evaluation.replies import check_question
from sinkprune.calibration.evaluation.report import Combination
from sinkprune.calibration.tasks import Item, check_closed_list, naming
from sinkprune.contract.budgets import AUTO, UNPRUNED
from sinkprune.contract.errors import TaskError
from sinkprune.runtime.confidence.thresholds import THRESHOLDS_VERSION, Thresholds
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.steps.answer import Answer, TriedBudget
from sinkprune.runtime.steps.prefix_cache import ladders


def with_closed_lists(items: Sequence[Item], choice: Sequence[str]) -> list[Item]:
    """Return the items, those without a closed list with the list `choice`; raises `TaskError` where one has none."""
    found = []
    for item in items:
        question = item.question
        if not question.closed_list:
            if not choice:
                raise TaskError(
                    f"{item.place}: the question about '{item.picture}' has no closed list. Give it 'choice' in the "
                    "data, or --choice twice or more for all such questions."
                )
            question = replace(question, choice=tuple(choice))
            try:
                check_closed_list(question)
            except TaskError as error:
                raise TaskError(f"{item.place}: {error}") from error
        found.append(replace(item, question=question))
    return found


def new_thresholds(pipeline: Pipeline, method: str, least: dict[str, float]) -> Thresholds:
    """Return the thresholds `least` for the bundle of a pipeline."""
    return Thresholds(THRESHOLDS_VERSION, pipeline.bundle.sha256, pipeline.backend.compute, method, least)


def ask_questions(
    pipeline: Pipeline, items: Sequence[Item], method: str, budgets: Sequence[str], on_run: Callable[[], None]
) -> tuple[list[str], list[float], AskedQuestions]:
    """Return the budgets, the smallest first and `none` last, their mean visual tokens a layer, and all answers.

    Each question is asked at each budget, and once at budget `auto` with all budgets as steps. The first question is
    asked twice, and the first time does not count. `on_run` is called after each question. Raises what a request
    raises, with the question's id. A question that is too long is found before the first is asked. An interrupt
    leaves the complete questions, if there are any: `AskedQuestions.right` then has fewer rows than `items`.
    """
    names = [*dict.fromkeys(name for name in budgets if name != UNPRUNED), UNPRUNED]
    pairs = [Combination(method, name) for name in (UNPRUNED, *names[:-1])]
    for item in items:
        with naming(item.place):
            longest = max(len(pipeline.prompts.answer_ids(text)) for text in item.question.closed_list)
        check_question(pipeline, item, pairs, longest)
    first = [_answer(pipeline, items[0], method, budget) for budget in names]
    means = {
        name: sum(one.tokens_per_layer) / len(one.tokens_per_layer) for name, one in zip(names, first, strict=True)
    }
    names = [*sorted(names[:-1], key=lambda name: means[name]), UNPRUNED]
    # No confidence reaches infinity, so every step runs.
    pipeline.thresholds = new_thresholds(pipeline, method, dict.fromkeys(names, math.inf))
    _answer(pipeline, items[0], method, AUTO)
    answers, stepped = [], []
    try:
        for number, item in enumerate(items):
            # Rotated, so that no budget is always asked first.
            turns = [*names, AUTO]
            turns = turns[number % len(turns) :] + turns[: number % len(turns)]
            own = {budget: _answer(pipeline, item, method, budget) for budget in turns}
            stepped.append(own.pop(AUTO))
            answers.append([own[name] for name in names])
            on_run()
    except KeyboardInterrupt:
        if not answers:
            raise
        items = items[: len(answers)]
    pipeline.thresholds = None
    columns = [*zip(*answers, strict=True)]
    groups = enumerate(ladders(pipeline.bundle.manifest, method))
    ladder_of = {name: number for number, group in groups for name in group}
    times = [
        _times(column, [one.tried[number] for one in stepped], ladder_of.get(name))
        for number, (name, column) in enumerate(zip(names, columns, strict=True))
    ]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(item.picture for item in items))}
    asked = AskedQuestions(
        right=np.array(
            [[item.question.is_right(one.text) for one in row] for item, row in zip(items, answers, strict=True)]
        ),
        confidence=np.array([[one.confidence or 0.0 for one in row] for row in answers]),
        pictures=np.array([numbers[item.picture] for item in items]),
        times=tuple(times),
    )
    return names, [means[name] for name in names], asked


def _times(alone: Sequence[Answer], steps: Sequence[TriedBudget], ladder: int | None) -> StepTimes:
    """Return the times of a budget from answers at it `alone`, and from `steps` after other budgets."""

    def of(*parts: str) -> float:
        return median(sum(answer.ms[part] or 0.0 for part in parts) for answer in alone)

    passes = max(0.0, of("latency") - of("ttft"))
    return StepTimes(
        ttft_ms=of("ttft"),
        tower_ms=of("preprocess", "vision"),
        resumed_ms=max(0.0, median(step.ms for step in steps) - passes) if steps[0].reused_rows else None,
        passes_ms=passes,
        ladder=ladder,
    )


def _answer(pipeline: Pipeline, item: Item, method: str, budget: str) -> Answer:
    question = item.question
    with naming(item.place):
        return pipeline.generate(
            item.load_image(), question.prompt, method=method, budget=budget, choice=question.closed_list
        )
