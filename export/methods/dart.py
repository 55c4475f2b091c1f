"""DART: tokens that repeat a few pivots least ("Stop Looking for Important Tokens in Multimodal Language Models:
Duplication Matters More"); method.md section 6.

The pivots are the 4 tokens of largest norm. DART's 4 text pivots are keys of a decoder layer: before the LLM, where
this plan acts, there are none.
"""

from __future__ import annotations

import onnx_ir as ir

from sinkprune.contract.budgets import Budget, Counts
from sinkprune.export.pruning.equal_mean import tokens_into_llm
from sinkprune.export.pruning.functions import cosines, unit_rows
from sinkprune.export.pruning.plan import PlanFacts, PlanGraphs
from sinkprune.export.pruning.sanitizer import ascending, give_tokens, largest, mask_of, new_sanitizer, smallest

PIVOTS = 4


def build(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """The pivots and for each in turn, from the largest norm on, its share of the tokens least similar to it.

    Shares are equal but for one token; what an earlier pivot took is no candidate of a later one. Raster order.
    """
    count = tokens_into_llm(facts, budget)
    pivots = min(PIVOTS, count)
    graph, features = new_sanitizer(facts)
    op = graph.op
    chosen = largest(graph, features.norms, pivots)
    similarity = cosines(op, unit_rows(op, op.Cast(features.tokens, to=ir.DataType.FLOAT)), chosen)
    for pivot in range(pivots):
        share = (count - pivots + pivots - 1 - pivot) // pivots
        if share:
            to_pivot = op.Squeeze(op.Slice(similarity, [pivot], [pivot + 1], [2]), [2])
            free = op.Where(mask_of(graph, features, chosen), float("inf"), to_pivot)
            chosen = op.Concat(chosen, smallest(graph, free, share), axis=1)
    give_tokens(graph, facts, features, ascending(graph, chosen, count), count)
    return PlanGraphs(Counts(outliers=0, sink=0, reserve=0, diverse=count, stages=()), graph)


METHODS = {"dart": build}
