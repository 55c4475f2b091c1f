"""Measures what chunks of actions cost here: at each budget, everything before the expert, and a denoising step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import median

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.costs.actions import LEAST_MS, BudgetCosts
from sinkprune.contract.reports.progress import OnProgress
from sinkprune.runtime.acting.report import ActionReport
from sinkprune.runtime.deadline.cost_measuring import MeasurementRounds

STEPS = 2
"""Denoising steps of a measured chunk: the later ones read what the first has brought into the processor's caches."""
Act = Callable[[str, int], ActionReport]
"""Returns a chunk at a budget, with a number of denoising steps."""


def measure_costs(act: Act, budgets: Sequence[str], seconds: float, progress: OnProgress) -> dict[str, BudgetCosts]:
    """Return the costs of chunks at each of `budgets`, as medians over about `seconds`.

    Budgets run in turn, those that keep the most tokens first. Raises what `act` raises.
    """
    runs: dict[str, list[tuple[float, float]]] = {budget: [] for budget in budgets}
    rounds = MeasurementRounds("measuring costs", seconds, len(budgets), progress)
    for counted in rounds:
        for budget, own in runs.items():
            began = time.perf_counter()
            report = act(budget, STEPS)
            whole = (time.perf_counter() - began) * 1e3
            rounds.complete_part()
            if counted:
                own.append((whole - sum(report.step_ms), sum(report.step_ms) / STEPS))
    costs = {
        budget: BudgetCosts(*(max(median(ms), LEAST_MS) for ms in zip(*own, strict=True)))
        for budget, own in runs.items()
    }
    pruned = [budget for budget in budgets if budget != UNPRUNED]
    return costs | dict(zip(pruned, accumulate((costs[budget] for budget in pruned), _at_most), strict=True))


def _at_most(larger: BudgetCosts, own: BudgetCosts) -> BudgetCosts:
    """Return a budget's `own` costs, at most those of a `larger` one: load may make fewer rows seem slower."""
    return BudgetCosts(min(larger.before_ms, own.before_ms), min(larger.step_ms, own.step_ms))
