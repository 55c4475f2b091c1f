"""Measures what chunks of actions cost here: at each budget, everything before the expert, and a denoising step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import mean, median

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.costs.actions import LEAST_MS, ActionCosts, BudgetCosts
from sinkprune.contract.costs.model import Place
from sinkprune.contract.reports.progress import OnProgress
from sinkprune.runtime.acting.report import ActionReport
from sinkprune.runtime.deadline.cost_measuring import MeasurementRounds

STEPS = 2
"""Denoising steps of a measured chunk: the later ones read what the first has brought into the processor's caches."""
Act = Callable[[str, int], tuple[float, ActionReport]]
"""Runs a chunk at a budget, with a number of denoising steps. Returns when its vision tower was done, in seconds of
`time.perf_counter`, and the chunk."""


def measure_costs(
    act: Act,
    method: str,
    budgets: Sequence[str],
    frames: int,
    place: Place,
    seconds: float,
    progress: OnProgress,
) -> ActionCosts:
    """Return the costs of chunks at each of `budgets`, as medians over about `seconds`.

    Budgets run in turn, those that keep the most tokens first. Raises what `act` raises.
    """
    runs: dict[str, list[tuple[float, float]]] = {budget: [] for budget in budgets}
    reports = dict[str, ActionReport]()
    rounds = MeasurementRounds("measuring costs", seconds, len(budgets), progress)
    for counted in rounds:
        for budget, own in runs.items():
            began, report = act(budget, STEPS)
            whole = (time.perf_counter() - began) * 1e3
            reports[budget] = report
            rounds.complete_part()
            if counted:
                own.append((whole - sum(report.step_ms), sum(report.step_ms) / STEPS))
    costs = dict[str, BudgetCosts]()
    for budget, own in runs.items():
        before, step = (max(median(ms), LEAST_MS) for ms in zip(*own, strict=True))
        costs[budget] = BudgetCosts(before, step, _rows(reports[budget]))
    pruned = [budget for budget in budgets if budget != UNPRUNED]
    costs |= dict(zip(pruned, accumulate((costs[budget] for budget in pruned), _at_most), strict=True))
    text = max(report.prompt_tokens for report in reports.values())
    return ActionCosts(method, frames, costs, place=place, prompt_tokens=text)


def _rows(report: ActionReport) -> float:
    return report.prompt_tokens + mean(report.tokens_per_layer)


def _at_most(larger: BudgetCosts, own: BudgetCosts) -> BudgetCosts:
    """Return a budget's `own` costs, at most those of a `larger` one: load may make fewer rows seem slower."""
    return replace(own, before_ms=min(larger.before_ms, own.before_ms), step_ms=min(larger.step_ms, own.step_ms))
