"""What a robot policy's chunks of actions cost on a machine, by budget.

`sinkprune.runtime.acting.costs` measures it. Chunks with a deadline choose a budget and a number of steps by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated

from sinkprune.contract.checks.fields import Bounds, Count, Few
from sinkprune.contract.costs.model import MeasuredCosts, Place

ACTION_COSTS_VERSION = 3
LEAST_MS = 1e-6
"""Costs are above 0, because measured times are divided by them."""
_Milliseconds = Annotated[float, Bounds(LEAST_MS, 1e12)]
_Rows = Annotated[float, Bounds(1, 1e9)]


@dataclass(frozen=True)
class BudgetCosts:
    """Median milliseconds of a chunk at one budget, from the end of the vision tower on."""

    before_ms: _Milliseconds
    """All but the denoising steps."""
    step_ms: _Milliseconds
    """One denoising step."""
    rows: _Rows
    """Text and visual tokens, as the mean over the decoder's layers."""

    def chunk_ms(self, steps: int) -> float:
        """Return the milliseconds of so many denoising steps and all before them."""
        return self.before_ms + steps * self.step_ms


@dataclass(frozen=True)
class ActionCosts(MeasuredCosts):
    """What chunks cost on this machine, on an idle one. `Policy.warm_up` measures it."""

    method: str
    frames: Few
    """The number of cameras with a frame. Fewer cost less."""
    budgets: dict[str, BudgetCosts]
    """By budget, those that keep the most tokens first."""
    place: Place = field(kw_only=True)
    prompt_tokens: Count = field(kw_only=True)
    """Text tokens of the measured prompt."""
    action_costs_version: Count = ACTION_COSTS_VERSION
    """`ACTION_COSTS_VERSION`."""

    def of_chunk(self, tokens: int, frames: int) -> dict[str, BudgetCosts]:
        """Return the costs by budget of a prompt with so many text tokens and cameras with a frame.

        A shorter prompt costs what was measured. Each further token is a row in all layers. Before the steps a row
        costs the largest budget's time, divided by its rows. In a step it costs what one row more does, by the
        largest and the smallest budget. So does, before the steps too, each visual row that fewer frames leave out.
        """
        budgets = list(self.budgets.values())
        largest, smallest = budgets[0], budgets[-1]
        more = max(0, tokens - self.prompt_tokens)
        before, step = largest.before_ms / largest.rows, largest.step_ms / largest.rows
        saved_before = saved_step = 0.0
        if largest.rows > smallest.rows:
            apart = largest.rows - smallest.rows
            step = saved_step = max(0.0, largest.step_ms - smallest.step_ms) / apart
            saved_before = max(0.0, largest.before_ms - smallest.before_ms) / apart
        found = {}
        for name, own in self.budgets.items():
            fewer = (1 - frames / self.frames) * max(0.0, own.rows - self.prompt_tokens)
            found[name] = replace(
                own,
                before_ms=max(LEAST_MS, own.before_ms + more * before - fewer * saved_before),
                step_ms=max(LEAST_MS, own.step_ms + more * step - fewer * saved_step),
            )
        return found
