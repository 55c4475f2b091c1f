"""What chunks of actions cost on this machine: at each budget, everything before the expert, and a denoising step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from sinkprune.contract.reports.progress import OnProgress
from sinkprune.runtime.acting.report import ActionReport
from sinkprune.runtime.deadline.cost_measuring import MeasurementRounds

STEPS = 2
"""Denoising steps of a measured chunk: the later ones read what the first has brought into the processor's caches."""
Act = Callable[[str, int], ActionReport]
"""Returns a chunk at a budget, with a number of denoising steps."""


@dataclass(frozen=True)
class BudgetCosts:
    """Median milliseconds of a chunk at one budget."""

    before_ms: float
    """All of the call of `act` except the denoising steps, with decoding frames that are files."""
    step_ms: float
    """One denoising step."""

    def chunk_ms(self, steps: int) -> float:
        """Return the milliseconds of a chunk of so many denoising steps."""
        return self.before_ms + steps * self.step_ms


@dataclass(frozen=True)
class ActionCosts:
    """What chunks cost on this machine, on an idle one. `Policy.warm_up` measures it."""

    method: str
    frames: int
    """The number of cameras with a frame. Fewer cost less."""
    budgets: Mapping[str, BudgetCosts]
    """By budget, those that keep the most tokens first."""


def measure_costs(
    act: Act, method: str, frames: int, budgets: Sequence[str], seconds: float, progress: OnProgress
) -> ActionCosts:
    """Return the costs of chunks with so many `frames` at each of `budgets`, as medians over about `seconds`.

    Budgets run in turn. Raises what `act` raises.
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
    return ActionCosts(
        method,
        frames,
        {budget: BudgetCosts(*(median(ms) for ms in zip(*own, strict=True))) for budget, own in runs.items()},
    )
