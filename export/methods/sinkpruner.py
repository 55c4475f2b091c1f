"""SinkPruner: the visual sanitizer before the LLM and the text-guided pruner at three decoder layers.

method.md sections 1 and 2 hold the rules; each step below names its own.
"""

from __future__ import annotations

import onnx_ir as ir

from sinkprune.budgets import Budget, Counts, prune_layers
from sinkprune.export.functions import diversity_select, top_rho
from sinkprune.export.graph import Graph
from sinkprune.export.methods import PlanFacts, PlanGraphs
from sinkprune.export.select import build_select

_FLOAT = ir.DataType.FLOAT
_INT64 = ir.DataType.INT64

layers = prune_layers


def build(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """The plan of `budget`: a sanitizer (unless the budget goes without) and a select after each prune layer."""
    cuts = layers(facts.language_model.num_layers)
    counts = budget.resolve(facts.visual_tokens)
    selects = {}
    for layer, kept in zip(cuts, counts.stages, strict=True):
        selects[layer] = Graph(f"select_after_{layer}", facts.precision)
        build_select(selects[layer], facts.language_model, kept, budget)
    if not budget.sanitizer:
        return PlanGraphs(None, selects)
    sanitizer = Graph("sanitizer", facts.precision)
    build_sanitizer(sanitizer, facts, budget, counts)
    return PlanGraphs(sanitizer, selects)


def build_sanitizer(graph: Graph, facts: PlanFacts, budget: Budget, counts: Counts) -> None:
    """`sanitizer` of the graph contract (method.md section 1)."""
    op, n, d = graph.op, facts.visual_tokens, facts.visual_width
    tokens = graph.input("tokens", ["G", n, d])
    norms = graph.input("norms", ["G", n], _FLOAT)
    salience = graph.input("salience", ["G", n], _FLOAT)

    # 1, 2: outliers and their mean
    sink = outlier = None
    if counts.outliers:
        sink, outlier = op.call(top_rho(), norms, tokens, per_mille=budget.outlier_per_mille)
        salience = op.Where(outlier, float("-inf"), salience)

    # 3: RES, the most salient of LOW
    _, reserved = op.TopK(salience, [counts.reserve], axis=-1, largest=1, sorted=1, _outputs=2)
    index = _ascending(graph, reserved, counts.reserve)

    # 4: DIV, the tokens of LOW least like what is kept
    if counts.diverse:
        ones = op.Expand(1, op.Shape(norms))
        free = op.ScatterElements(ones, reserved, op.Expand(0, op.Shape(reserved)), axis=1)
        candidate = op.Cast(free, to=ir.DataType.BOOL)
        if counts.outliers:
            candidate = op.And(candidate, op.Not(outlier))
        function = diversity_select(rounds=-(-counts.diverse // budget.batch))
        diverse = op.call(function, tokens, candidate, reserved, [counts.diverse], batch=budget.batch)
        index = op.Concat(index, diverse, axis=1)

    # 5: Z = [sink ; RES ; DIV]
    if budget.order == "raster":
        index = _ascending(graph, index, counts.reserve + counts.diverse)
    kept = op.GatherND(tokens, op.Unsqueeze(index, [-1]), batch_dims=1)
    if counts.sink:
        _, first = op.TopK(norms, [1], axis=-1, largest=1, sorted=1, _outputs=2)
        kept = op.Concat(sink, kept, axis=1)
        index = op.Concat(first, index, axis=1)
    graph.output("kept_tokens", kept, ["G", counts.kept, d])
    graph.output("kept_index", index, ["G", counts.kept], _INT64)


def _ascending(graph: Graph, index: ir.Value, count: int) -> ir.Value:
    """The `count` indices of each row in ascending order. fp32 holds every index up to 2**24 exactly."""
    op = graph.op
    ordered, _ = op.TopK(op.Cast(index, to=_FLOAT), [count], axis=-1, largest=0, sorted=1, _outputs=2)
    return op.Cast(ordered, to=_INT64)
