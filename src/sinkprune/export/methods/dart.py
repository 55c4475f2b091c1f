"""DART: tokens that repeat a few pivots least ("Stop Looking for Important Tokens in Multimodal Language Models:
Duplication Matters More"); docs/methods.md.

The pivots are the 4 tokens of largest norm. DART's 4 text pivots are keys of a decoder layer: before the LLM, where
this plan acts, there are none.
"""

from __future__ import annotations

import onnx_ir as ir

from sinkprune.contract.budgets import Budget
from sinkprune.export.pruning.equal_mean import kept_before, tokens_into_llm
from sinkprune.export.pruning.functions import cosines, unit_rows
from sinkprune.export.pruning.plan import PlanFacts, PlanGraphs
from sinkprune.export.pruning.sanitizer import ascending, give_tokens, largest, mask_of, new_sanitizer, smallest
from sinkprune.export.pruning.shares import sanitizer_counts, vector

PIVOTS = 4


def build(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """The pivots and for each in turn, from the largest norm on, its share of the tokens least similar to it.

    Shares are equal but for one token; what an earlier pivot took is no candidate of a later one. Raster order.
    """
    kept = kept_before(facts, budget, diverse=tokens_into_llm(facts, budget))
    most = facts.most_counts(kept).kept
    facts.check_ranked(most)
    graph, features = new_sanitizer(facts, kept)
    op = graph.op
    count = sanitizer_counts(op, facts, kept, features.norms).diverse
    pivots = op.Min(vector(count), [PIVOTS])
    chosen = largest(graph, features.norms, pivots)
    similarity = cosines(op, unit_rows(op, op.Cast(features.tokens, to=ir.DataType.FLOAT)), chosen)
    # No image has a share for more pivots than the largest.
    for pivot in range(min(PIVOTS, most - PIVOTS)):
        # Where an image keeps fewer than there are pivots, the last stands for those it lacks, and its share is 0.
        share = op.Max(op.Div(op.Sub(vector(count), [1 + pivot]), pivots), [0])
        to_pivot = op.Squeeze(op.Gather(similarity, op.Min([pivot], op.Sub(pivots, [1])), axis=2), [2])
        free = op.Where(mask_of(graph, features, chosen), float("inf"), to_pivot)
        chosen = op.Concat(chosen, smallest(graph, free, share), axis=1)
    give_tokens(graph, facts, kept, features, ascending(graph, chosen, count))
    return PlanGraphs(kept, graph)


METHODS = {"dart": build}
