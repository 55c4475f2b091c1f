"""SinkPruner with a sanitizer that reads the question. The rule is ours; the paper leaves it open.

RES takes the tokens of largest salience and relevance together. The relevance of a token is the mean of its cosines
with the words of the question, both as the LLM receives them. Both scores are scaled to 0 to 1 over the tokens that
are no outliers, and have equal weight. All other steps are SinkPruner's. `sinkpruner-text-heads` also has the stages
of `sinkpruner-heads`.
"""

from __future__ import annotations

from functools import partial

import onnx_ir as ir

from sinkprune.export.graph import Graph
from sinkprune.export.methods.sinkpruner import build, build_with_heads
from sinkprune.export.pruning.plan import PlanFacts
from sinkprune.export.pruning.question import mean_cosines, rows_in_llm
from sinkprune.export.pruning.sanitizer import TowerValues

# Far below any spread of scores; where all are equal, 0 is divided by it.
_LEAST_SPREAD = 1e-30


def by_salience_and_relevance(
    facts: PlanFacts, graph: Graph, features: TowerValues, outlier: ir.Value | None
) -> ir.Value:
    """Return the scaled salience plus the scaled relevance, [G,N]."""
    relevance = mean_cosines(graph.op, *rows_in_llm(facts, graph, features))
    return graph.op.Add(_scaled(graph, features.salience, outlier), _scaled(graph, relevance, outlier))


build_with_text = partial(build, score=by_salience_and_relevance)
build_with_text_and_heads = partial(build_with_heads, score=by_salience_and_relevance)


def _scaled(graph: Graph, values: ir.Value, outlier: ir.Value | None) -> ir.Value:
    """Return `values` [G,N] scaled so that they go from 0 to 1 over each group's tokens that are no outliers."""
    op = graph.op
    low, high = (values if outlier is None else op.Where(outlier, float(f"{sign}inf"), values) for sign in ("", "-"))
    least, most = op.ReduceMin(low, [-1], keepdims=1), op.ReduceMax(high, [-1], keepdims=1)
    return op.Div(op.Sub(values, least), op.Max(op.Sub(most, least), _LEAST_SPREAD))
