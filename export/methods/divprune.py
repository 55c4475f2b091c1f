"""DivPrune: greedy max-min cosine distance ("DivPrune: Diversity-based Visual Token Pruning for Large Multimodal
Models"); method.md section 6.

Our DIV rule with one token reserved: the one whose largest similarity to any other is smallest. Like DIV it takes
`batch` tokens a round; DivPrune's own serial rule is the budget's option `serial`, one round a token, 1.6 kB of graph
a round.
"""

from __future__ import annotations

import onnx_ir as ir

from sinkprune.contract.budgets import Budget, Counts
from sinkprune.export.graph import Graph
from sinkprune.export.pruning.equal_mean import tokens_into_llm
from sinkprune.export.pruning.functions import cosines, diversity_select, unit_rows
from sinkprune.export.pruning.plan import PlanFacts, PlanGraphs
from sinkprune.export.pruning.sanitizer import Features, ascending, give_tokens, mask_of, new_sanitizer, smallest


def build(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """The tokens least similar to each other, in raster order."""
    count = tokens_into_llm(facts, budget)
    graph, features = new_sanitizer(facts)
    op = graph.op
    index = _loneliest(graph, facts, features)
    if count > 1:
        function = diversity_select(rounds=-(-(count - 1) // budget.diversity_group_size), opset=facts.dialect.OPSET)
        candidate = op.Not(mask_of(graph, features, index))
        others = op.call(function, features.tokens, candidate, index, [count - 1], batch=budget.diversity_group_size)
        index = ascending(graph, op.Concat(index, others, axis=1), count)
    give_tokens(graph, facts, features, index, count)
    return PlanGraphs(Counts(outliers=0, sink=0, reserve=0, diverse=count, stages=()), graph)


METHODS = {"divprune": build}


def _loneliest(graph: Graph, facts: PlanFacts, features: Features) -> ir.Value:
    """[G,1]: the token whose largest cosine with another is smallest."""
    op = graph.op
    place = op.Range(0, facts.visual_tokens, 1)
    everyone = op.Expand(op.Unsqueeze(place, [0]), op.Shape(features.norms))
    unit = unit_rows(op, op.Cast(features.tokens, to=ir.DataType.FLOAT))
    itself = op.Equal(op.Unsqueeze(place, [0]), op.Unsqueeze(place, [1]))
    similarity = op.Where(itself, float("-inf"), cosines(op, unit, everyone))
    return smallest(graph, op.ReduceMax(similarity, [-1], keepdims=0), 1)
