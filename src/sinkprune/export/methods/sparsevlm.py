"""SparseVLM ("SparseVLM: Visual Token Sparsification for Efficient Vision-Language Model Inference"): our scorer at
our layers on all tokens, asked by the text rows that are like the image; docs/methods.md.

The paper picks those rows once, by the embeddings before the LLM; a select sees the hidden states behind its own
layer, and picks by these. Its recycling of dropped tokens is left out.
"""

from __future__ import annotations

from sinkprune.contract.budgets import Budget, prune_layers
from sinkprune.export.pruning.equal_mean import scaled_stages
from sinkprune.export.pruning.plan import PlanFacts, PlanGraphs
from sinkprune.export.pruning.select import build_selects, text_like_the_image


def build(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """All tokens up to the first cut, then the budget's stages, scaled down alike until its mean is met."""
    cuts = prune_layers(facts.language_model.num_layers)
    kept = scaled_stages(facts, budget, cuts, budget.resolve(facts.nominal_tokens).stages)
    return PlanGraphs(kept, select_after=build_selects(facts, kept, cuts, text_like_the_image))


METHODS = {"sparsevlm": build}
