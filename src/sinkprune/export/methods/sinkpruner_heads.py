"""SinkPruner whose stages read a few chosen heads of their layer, in the place of the mean over all heads.

ProViP scores stages with such "visual heads". Its text was not read, so the rule is ours (docs/methods.md):
`sinkprune-calibrate attention --heads` chooses the heads on a user's pictures and questions.
"""

from __future__ import annotations

from sinkprune.contract.budgets import Budget, prune_layers
from sinkprune.contract.errors import BudgetError
from sinkprune.export.methods.sinkpruner import build_after
from sinkprune.export.pruning.chosen_heads import HOW_TO_CHOOSE, NAME
from sinkprune.export.pruning.plan import PlanFacts, PlanGraphs


def build(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """Return SinkPruner's plan of `budget` with the chosen heads; raises `BudgetError` if none were chosen."""
    if not facts.heads:
        raise BudgetError(f"method '{NAME}' needs attention heads that are chosen on your pictures. {HOW_TO_CHOOSE}")
    cuts = prune_layers(facts.language_model.num_layers) if budget.stages else ()
    return build_after(facts, budget, cuts, heads={layer: facts.heads[layer] for layer in cuts})


METHODS = {NAME: build}
