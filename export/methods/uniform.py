"""Baselines that never look at the image: `uniform`, evenly spaced tokens, and `random`, a fixed random draw.

method.md section 6. Both keep the same places of every image of a bundle, written into the graph.
"""

from __future__ import annotations

from random import Random

from sinkprune.contract.budgets import Budget, Counts
from sinkprune.export.pruning.equal_mean import tokens_into_llm
from sinkprune.export.pruning.plan import PlanFacts, PlanGraphs
from sinkprune.export.pruning.sanitizer import give_tokens, new_sanitizer

SEED = 0


def build_uniform(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """The middle token of each of k equal parts of the image, in raster order."""
    count, n = tokens_into_llm(facts, budget), facts.visual_tokens
    return _fixed(facts, [(2 * part + 1) * n // (2 * count) for part in range(count)])


def build_random(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """The k tokens of largest score, scores drawn from `SEED`: what a small budget keeps, a large one keeps too."""
    draw = Random(SEED)
    scores = [draw.random() for _ in range(facts.visual_tokens)]
    ranked = sorted(range(facts.visual_tokens), key=scores.__getitem__, reverse=True)
    return _fixed(facts, sorted(ranked[: tokens_into_llm(facts, budget)]))


METHODS = {"uniform": build_uniform, "random": build_random}


def _fixed(facts: PlanFacts, places: list[int]) -> PlanGraphs:
    graph, features = new_sanitizer(facts)
    give_tokens(graph, facts, features, graph.op.Constant(value_ints=places), len(places))
    return PlanGraphs(Counts(outliers=0, sink=0, reserve=0, diverse=len(places), stages=()), graph)
