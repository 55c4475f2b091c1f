"""FasterVLM: the tokens of largest CLS attention ("[CLS] Attention is All You Need for Training-Free Visual Token
Pruning"); method.md section 6. Its score is our salience.
"""

from __future__ import annotations

from sinkprune.contract.budgets import Budget, Counts
from sinkprune.export.pruning.equal_mean import tokens_into_llm
from sinkprune.export.pruning.plan import PlanFacts, PlanGraphs
from sinkprune.export.pruning.sanitizer import ascending, give_tokens, largest, new_sanitizer


def build(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """The most salient tokens, in raster order."""
    count = tokens_into_llm(facts, budget)
    graph, features = new_sanitizer(facts)
    index = ascending(graph, largest(graph, features.salience, count), count)
    give_tokens(graph, facts, features, index, count)
    return PlanGraphs(Counts(outliers=0, sink=0, reserve=count, diverse=0, stages=()), graph)


METHODS = {"fastervlm": build}
