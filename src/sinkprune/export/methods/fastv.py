"""FastV ("An Image is Worth 1/2 Tokens After Layer 2"): one cut inside the LLM, by the last token's attention.

docs/methods.md. After layer 2 (0-based, of 32) the visual tokens stay that the last token attends to most.
"""

from __future__ import annotations

from sinkprune.contract.budgets import Budget, scaled_layers
from sinkprune.export.pruning.equal_mean import scaled_stages
from sinkprune.export.pruning.plan import PlanFacts, PlanGraphs
from sinkprune.export.pruning.select import build_selects, last_row


def build(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """All tokens up to the cut, then as many as meet the budget's mean."""
    cuts = scaled_layers((2,), facts.language_model.num_layers)
    kept = scaled_stages(facts, budget, cuts, [facts.nominal_tokens])
    return PlanGraphs(kept, select_after=build_selects(facts, kept, cuts, last_row))


METHODS = {"fastv": build}
