"""DivPrune: greedy max-min cosine distance ("DivPrune: Diversity-based Visual Token Pruning for Large Multimodal
Models"); docs/methods.md.

Our DIV rule with one token reserved: the one whose largest similarity to any other is smallest. Like DIV it takes
`batch` tokens a round; DivPrune's own serial rule is the budget's option `serial`, one round a token, 1.6 kB of graph
a round.
"""

from __future__ import annotations

import onnx_ir as ir

from sinkprune.contract.budgets import Budget
from sinkprune.export.graph import Graph
from sinkprune.export.pruning.equal_mean import kept_before, tokens_into_llm
from sinkprune.export.pruning.functions import cosines, diversity_select, unit_rows
from sinkprune.export.pruning.plan import PlanFacts, PlanGraphs
from sinkprune.export.pruning.sanitizer import Features, ascending, give_tokens, mask_of, new_sanitizer, smallest
from sinkprune.export.pruning.shares import sanitizer_counts, vector


def build(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """The tokens least similar to each other, in raster order."""
    kept = kept_before(facts, budget, diverse=tokens_into_llm(facts, budget))
    most, batch = facts.most_counts(kept).kept, budget.diversity_group_size
    facts.check_ranked(most)
    graph, features = new_sanitizer(facts, kept)
    op = graph.op
    index = _loneliest(graph, features)
    if most > 1:
        function = diversity_select(rounds=-(-(most - 1) // batch), opset=facts.dialect.OPSET)
        count = sanitizer_counts(op, facts, kept, features.norms).diverse
        candidate = op.Not(mask_of(graph, features, index))
        others = op.call(function, features.tokens, candidate, index, op.Sub(vector(count), [1]), batch=batch)
        index = ascending(graph, op.Concat(index, others, axis=1), count)
    give_tokens(graph, facts, kept, features, index)
    return PlanGraphs(kept, graph)


METHODS = {"divprune": build}


def _loneliest(graph: Graph, features: Features) -> ir.Value:
    """[G,1]: the token whose largest cosine with another is smallest."""
    op = graph.op
    place = op.Range(0, op.Squeeze(op.Shape(features.norms, start=1, end=2)), 1)
    everyone = op.Expand(op.Unsqueeze(place, [0]), op.Shape(features.norms))
    unit = unit_rows(op, op.Cast(features.tokens, to=ir.DataType.FLOAT))
    itself = op.Equal(op.Unsqueeze(place, [0]), op.Unsqueeze(place, [1]))
    similarity = op.Where(itself, float("-inf"), cosines(op, unit, everyone))
    return smallest(graph, op.ReduceMax(similarity, [-1], keepdims=0), 1)
