"""What `sinkprune-calibrate schedule --json` writes: costs, the budget that was found, and how it did."""

from __future__ import annotations

from dataclasses import dataclass

from sinkprune.contract.budgets import Budget
from sinkprune.contract.costs.model import Costs
from sinkprune.contract.reports.report import Spread


@dataclass(frozen=True)
class OtherCuts:
    """What a bundle with more cuts could do at the same price."""

    methods: tuple[str, ...]
    """What to export with: `sinkprune-export --methods`."""
    cut_after: tuple[int, ...]
    """The 0-based layers it would be cut after."""
    stages_after: tuple[int, ...]
    """Those that the best budget's stages would follow."""
    lost: float
    """The share of text-visual attention it would drop; what layers between measured ones attend to is taken from
    those."""


@dataclass(frozen=True)
class Candidate:
    """A budget that fits."""

    budget: Budget
    stages_after: tuple[int, ...]
    """The 0-based layers that its stages follow."""
    rows: tuple[int, ...]
    """Visual rows into the LLM and behind each stage, of the picture that was measured."""
    mean_visual_tokens: float
    """Visual tokens a decoder layer runs on, mean over layers."""
    lost: float
    """The share of text-visual attention that it drops, mean over layers."""
    accuracy: float | None
    """The fraction of the data's questions that it answers rightly; None where no data were given."""
    predicted_ms: float
    """To the last of the new tokens."""


@dataclass(frozen=True)
class ScheduleReport:
    """What was found."""

    name: str
    """The budget's, in the bundle."""
    pictures: int
    """How many were looked at."""
    visual_tokens: int
    prompt_tokens: int
    new_tokens: int
    costs: Costs
    unpruned_ms: float
    """Predicted."""
    unpruned_accuracy: float | None
    chosen: Candidate
    others: tuple[Candidate, ...]
    """Those that were looked at more closely beside it."""
    measured_ms: Spread
    """Of the chosen budget, to the last of the new tokens."""
    unpruned_measured_ms: Spread
    """Of the unpruned model, in turn with the chosen budget: beside `unpruned_ms` it tells by how much the machine's
    speed changed since costs were measured."""
    other_cuts: tuple[OtherCuts, ...]

    def meets(self, ms: float | None) -> bool:
        """Whether 95 of 100 measured requests took at most `ms` milliseconds; true where no time is wanted."""
        return ms is None or self.measured_ms.p95 <= ms

    @property
    def off(self) -> float:
        """How far the prediction is off what was measured, as a share of that."""
        return self.chosen.predicted_ms / self.measured_ms.median - 1
