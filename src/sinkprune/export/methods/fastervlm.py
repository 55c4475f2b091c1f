"""FasterVLM: the tokens of largest CLS attention ("[CLS] Attention is All You Need for Training-Free Visual Token
Pruning"); docs/methods.md. Its score is our salience, which towers without a CLS token have too.
"""

from __future__ import annotations

from sinkprune.contract.budgets import Budget
from sinkprune.export.pruning.equal_mean import kept_before, tokens_into_llm
from sinkprune.export.pruning.plan import PlanFacts, PlanGraphs
from sinkprune.export.pruning.sanitizer import ascending, give_tokens, largest, new_sanitizer
from sinkprune.export.pruning.shares import sanitizer_counts


def build(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """The most salient tokens, in raster order."""
    kept = kept_before(facts, budget, reserve=tokens_into_llm(facts, budget))
    facts.check_ranked(facts.most_counts(kept).kept)
    graph, features = new_sanitizer(facts, kept)
    count = sanitizer_counts(graph.op, facts, kept, features.norms).reserve
    index = ascending(graph, largest(graph, features.salience, count), count)
    give_tokens(graph, facts, kept, features, index)
    return PlanGraphs(kept, graph)


METHODS = {"fastervlm": build}
