"""What a robot policy's chunks of actions cost on a machine, by budget.

`sinkprune.runtime.acting.costs` measures it. Chunks with a deadline choose a budget and a number of steps by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from sinkprune.contract.checks.fields import Bounds, Count, Few
from sinkprune.contract.costs.model import MeasuredCosts, Place

ACTION_COSTS_VERSION = 1
LEAST_MS = 1e-6
"""Costs are above 0, because measured times are divided by them."""
_Milliseconds = Annotated[float, Bounds(LEAST_MS, 1e12)]


@dataclass(frozen=True)
class BudgetCosts:
    """Median milliseconds of a chunk at one budget."""

    before_ms: _Milliseconds
    """All of the call of `act` except the denoising steps, with decoding frames that are files."""
    step_ms: _Milliseconds
    """One denoising step."""

    def chunk_ms(self, steps: int) -> float:
        """Return the milliseconds of a chunk of so many denoising steps."""
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
    action_costs_version: Count = ACTION_COSTS_VERSION
    """`ACTION_COSTS_VERSION`."""
