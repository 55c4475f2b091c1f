"""PyramidDrop ("PyramidDrop: Accelerating Your Large Vision-Language Models via Pyramid Visual Redundancy
Reduction"): three cuts inside the LLM, each by the last instruction token's attention; docs/methods.md.

After the layers 8, 16 and 24 (0-based, of 32) a constant share of the visual tokens left stays: half in the paper,
here the share that meets the budget's mean.
"""

from __future__ import annotations

from sinkprune.contract.budgets import Budget, scaled_layers
from sinkprune.export.pruning.equal_mean import constant_ratio
from sinkprune.export.pruning.plan import PlanFacts, PlanGraphs
from sinkprune.export.pruning.select import build_selects, last_row


def build(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """All tokens up to the first cut, then the same share of what is left after each."""
    cuts = scaled_layers((8, 16, 24), facts.language_model.num_layers)
    kept = constant_ratio(facts, budget, cuts)
    return PlanGraphs(kept, select_after=build_selects(facts, kept, cuts, last_row))


METHODS = {"pyramiddrop": build}
