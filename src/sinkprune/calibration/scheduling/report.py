"""The report of `sinkprune-calibrate schedule --json`: costs, the chosen budget, and its measured time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sinkprune.contract.budgets import Budget
from sinkprune.contract.costs.model import Costs
from sinkprune.contract.reports.report import Spread

NEAR: Final = 0.08
"""The largest error of an accurate prediction, as a share of the measured time."""


@dataclass(frozen=True)
class OtherCuts:
    """The best budget of a bundle with more cuts, at the same price."""

    methods: tuple[str, ...]
    """The methods to export with: `sinkprune-export --methods`."""
    cut_after: tuple[int, ...]
    """The 0-based layers after which the bundle would be cut."""
    stages_after: tuple[int, ...]
    """The 0-based layers that the best budget's stages would follow."""
    lost: float
    """The share of text-visual attention it would drop; layers without a measurement take that of a neighbour."""


@dataclass(frozen=True)
class Candidate:
    """A budget that is predicted to meet the target."""

    budget: Budget
    stages_after: tuple[int, ...]
    """The 0-based layers that its stages follow."""
    rows: tuple[int, ...]
    """Visual rows into the LLM and after each stage, for the measured picture."""
    mean_visual_tokens: float
    """Visual tokens a layer, mean over layers."""
    lost: float
    """The share of text-visual attention that it drops, mean over layers."""
    accuracy: float | None
    """The share of right answers to the questions of --data; None without --data."""
    predicted_ms: float
    """Predicted milliseconds to the last of the new tokens."""


@dataclass(frozen=True)
class ScheduleReport:
    """The chosen budget, the alternatives, and their times."""

    name: str
    """The budget's, in the bundle."""
    pictures: int
    """Pictures whose attention was measured."""
    visual_tokens: int
    prompt_tokens: int
    new_tokens: int
    costs: Costs
    unpruned_ms: float
    """Predicted."""
    questions: int
    """Questions of --data that were answered; 0 without --data."""
    unpruned_accuracy: float | None
    chosen: Candidate
    others: tuple[Candidate, ...]
    """The other budgets that were compared by their answers."""
    measured_ms: Spread
    """Of the chosen budget, to the last of the new tokens."""
    unpruned_measured_ms: Spread
    """Of the unpruned model, measured in turn with the chosen budget.

    Its ratio to `unpruned_ms` is the change of the machine's speed since the costs were measured.
    """
    requests: int
    """Of each of these two times: the measured requests. Of fewer than 20, the 95th percentile is the slowest."""
    other_cuts: tuple[OtherCuts, ...]
    searches: int = 1
    """How many times a budget was searched and measured."""
    nearest_target_ms: int | None = None
    """The nearest target that a budget may meet, if no budget met the target."""
    cheapest_p95_ms: float | None = None
    """The measured 95th percentile of the cheapest budget, from which `nearest_target_ms` follows; else None."""
    warnings: tuple[str, ...] = ()
    """Why the figures say little, and what is doubtful about the budget."""
    seen_share: float = 1.0
    """The share of its area that the model sees of the picture that it sees least of."""

    def meets(self, ms: float | None) -> bool:
        """Return whether 95 of 100 measured requests took at most `ms` milliseconds; true for None."""
        return ms is None or self.measured_ms.p95 <= ms

    @property
    def off(self) -> float:
        """The error of the prediction, as a share of the measured time."""
        return self.chosen.predicted_ms / self.measured_ms.median - 1

    @property
    def accurate(self) -> bool:
        """Whether the measured time confirms the prediction."""
        return abs(self.off) <= NEAR
