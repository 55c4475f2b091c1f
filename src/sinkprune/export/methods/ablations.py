"""The paper's ablations: SinkPruner without one part, at the same mean visual tokens per layer (docs/methods.md).

The most salient tokens take the places of the missing part.
"""

from __future__ import annotations

from dataclasses import replace

from sinkprune.contract.budgets import Budget, prune_layers
from sinkprune.export.methods.sinkpruner import build, build_after
from sinkprune.export.pruning.equal_mean import scaled_stages, shares_of, without_stages
from sinkprune.export.pruning.plan import PlanFacts, PlanGraphs


def no_sanitizer(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """Pass every token to the LLM; the stage keeps as many as meet the mean."""
    cuts = prune_layers(facts.language_model.num_layers)[:1]
    return build_after(facts, scaled_stages(facts, budget, cuts, [facts.nominal_tokens]), cuts)


def no_text_pruner(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """Keep the mean in the sanitizer, salient and diverse tokens in the budget's proportion, without a stage."""
    return build(facts, without_stages(facts, budget))


def no_diversity(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """Keep salient tokens in the places of diverse ones, duplicates included."""
    counts = budget.resolve(facts.nominal_tokens)
    return build(facts, shares_of(facts, budget, replace(counts, reserve=counts.reserve + counts.diverse, diverse=0)))


def no_outlier_removal(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """Treat high-norm tokens like all others; a salient token takes the sink's place."""
    return _without_sink(facts, budget, replace(budget, remove_outliers=False))


def no_aggregation(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """Drop high-norm tokens without averaging them; a salient token takes the sink's place."""
    return _without_sink(facts, budget, replace(budget, aggregate=False))


def _without_sink(facts: PlanFacts, budget: Budget, without: Budget) -> PlanGraphs:
    """Return the plan of `without` that keeps as many tokens as `budget`, or all if there are fewer."""
    n = facts.nominal_tokens
    kept, counts = budget.resolve(n).kept, without.resolve(n)
    reserve = min(kept, n - counts.outliers) - counts.diverse
    return build(facts, shares_of(facts, without, replace(counts, reserve=reserve)))
