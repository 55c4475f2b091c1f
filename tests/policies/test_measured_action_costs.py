"""Costs of chunks: medians of what was measured after the tower, by a clock that chunks move."""

from __future__ import annotations

import time

import pytest

from sinkprune.deadlines.costs import BudgetCosts, Place
from sinkprune.policies.deadline import MEASURED_STEPS, measure_costs
from sinkprune.policies.report import ActionReport

PLACE = Place("0" * 64, (), "fp32", "fp32", "ort-cpu", "fp32", 2, "a machine")


def chunk_of(budget: str, step_ms: list[float]) -> ActionReport:
    """A chunk that only measuring costs reads: 7 tokens of text, and 100 or 20 of frames in each layer."""
    layers = [100, 100] if budget == "none" else [30, 10]
    return ActionReport(None, True, "", budget, len(step_ms), 7, 100, layers, {}, step_ms, None, ())  # type: ignore[arg-type]


def test_costs_are_medians_without_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk takes 10 and 3 times its number of milliseconds, by a clock that chunks move."""
    clock, ran = [0.0], list[tuple[str, int]]()
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0] / 1e3)

    def act(budget: str, steps: int) -> tuple[float, ActionReport]:
        # The frames and the tower take any time.
        clock[0] += 100 * len(ran)
        tower, times = clock[0] / 1e3, 1000 if len(ran) < 2 else 1 + len(ran) // 2
        ran.append((budget, steps))
        step = [times * (3.0 if budget == "none" else 1.0)] * steps
        clock[0] += 10 * times + sum(step)
        return tower, chunk_of(budget, step)

    costs = measure_costs(act, "sinkpruner", ("none", "prune-88.9"), 1, PLACE, 0.0, lambda *_: None)
    assert (costs.method, costs.frames, costs.place, costs.prompt_tokens) == ("sinkpruner", 1, PLACE, 7)
    budgets = costs.budgets
    assert ran[:4] == [("none", MEASURED_STEPS), ("prune-88.9", MEASURED_STEPS)] * 2
    # Three rounds count, whose chunks take 2, 3 and 4 times as long.
    assert len(ran) == 8
    assert budgets["none"] == BudgetCosts(pytest.approx(30), pytest.approx(9), 107)  # type: ignore[arg-type]
    assert budgets["prune-88.9"] == BudgetCosts(pytest.approx(30), pytest.approx(3), 27)  # type: ignore[arg-type]
    assert budgets["none"].chunk_ms(10) == pytest.approx(120)


def test_a_smaller_budget_costs_at_most_what_a_larger_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load does not make it seem slower than a larger one. Pruning itself may be slower."""
    clock, ms = [0.0], {"none": (10, 1), "prune-66.7": (30, 5), "prune-80": (25, 7), "prune-88.9": (28, 4)}
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0] / 1e3)

    def act(budget: str, steps: int) -> tuple[float, ActionReport]:
        (before, step), tower = ms[budget], clock[0] / 1e3
        clock[0] += before + steps * step
        return tower, chunk_of(budget, [float(step)] * steps)

    found = measure_costs(act, "sinkpruner", tuple(ms), 1, PLACE, 0.0, lambda *_: None).budgets
    assert {name: (round(own.before_ms, 6), round(own.step_ms, 6)) for name, own in found.items()} == {
        "none": (10, 1),
        "prune-66.7": (30, 5),
        "prune-80": (25, 5),
        "prune-88.9": (25, 4),
    }
