"""Methods that drop tokens inside the LLM only, by attention (docs/methods.md).

All keep every token up to their first cut, and meet the budget's mean.
"""

from __future__ import annotations

from sinkprune.contract.budgets import Budget, prune_layers, scaled_layers
from sinkprune.export.pruning.equal_mean import scaled_stages
from sinkprune.export.pruning.plan import PlanFacts, PlanGraphs
from sinkprune.export.pruning.select import build_selects, last_row, text_like_the_image


def fastv(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """Keep the visual tokens that the last token attends to most after layer 2 (0-based, of 32): FastV ("An Image is
    Worth 1/2 Tokens After Layer 2")."""
    cuts = scaled_layers((2,), facts.language_model.num_layers)
    kept = scaled_stages(facts, budget, cuts, [facts.nominal_tokens])
    return PlanGraphs(kept, select_after=build_selects(facts, kept, cuts, last_row))


def sparsevlm(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """Keep the budget's stages at our layers, queried by the text rows that are like the image: SparseVLM
    ("SparseVLM: Visual Token Sparsification for Efficient Vision-Language Model Inference").

    The paper chooses those rows once, by the embeddings before the LLM. A select chooses them by the hidden states
    after its own layer. The paper's recycling of dropped tokens is left out.
    """
    cuts = prune_layers(facts.language_model.num_layers)
    kept = scaled_stages(facts, budget, cuts, budget.resolve(facts.nominal_tokens).stages)
    return PlanGraphs(kept, select_after=build_selects(facts, kept, cuts, text_like_the_image))
