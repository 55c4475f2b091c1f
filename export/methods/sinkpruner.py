"""SinkPruner: the visual sanitizer before the LLM and the text-guided pruner at three decoder layers.

method.md sections 1 and 2 hold the rules; each step below names its own.
"""

from __future__ import annotations

import onnx_ir as ir

from sinkprune.budgets import Budget, Counts, prune_layers
from sinkprune.export.functions import diversity_select, top_rho
from sinkprune.export.graph import Graph
from sinkprune.export.methods import PlanFacts, PlanGraphs
from sinkprune.export.sanitizer import ascending, gather_rows, give_rows, new_sanitizer
from sinkprune.export.select import build_selects, every_text_row


def build(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """The plan of `budget`: a sanitizer (unless the budget goes without) and a select after each prune layer."""
    return build_counts(facts, budget, budget.resolve(facts.visual_tokens))


def build_counts(facts: PlanFacts, budget: Budget, counts: Counts) -> PlanGraphs:
    """The plan that keeps `counts`, with the options of `budget`."""
    cuts = prune_layers(facts.language_model.num_layers) if counts.stages else ()
    selects = build_selects(facts, budget, dict(zip(cuts, counts.stages, strict=True)), every_text_row)
    return PlanGraphs(counts, build_sanitizer(facts, budget, counts) if budget.sanitizer else None, selects)


METHODS = {"sinkpruner": build}


def build_sanitizer(facts: PlanFacts, budget: Budget, counts: Counts) -> Graph:
    """`sanitizer` of the graph contract (method.md section 1)."""
    graph, (tokens, norms, salience) = new_sanitizer(facts)
    op = graph.op

    # 1, 2: outliers and their mean
    sink = outlier = None
    if counts.outliers:
        sink, outlier = op.call(top_rho(facts.dialect.OPSET), norms, tokens, per_mille=budget.outlier_per_mille)
        salience = op.Where(outlier, float("-inf"), salience)

    # 3: RES, the most salient of LOW
    _, reserved = op.TopK(salience, [counts.reserve], axis=-1, largest=1, sorted=1, _outputs=2)
    index = ascending(graph, reserved, counts.reserve)

    # 4: DIV, the tokens of LOW least like what is kept
    if counts.diverse:
        ones = op.Expand(1, op.Shape(norms))
        free = op.ScatterElements(ones, reserved, op.Expand(0, op.Shape(reserved)), axis=1)
        candidate = op.Cast(free, to=ir.DataType.BOOL)
        if counts.outliers:
            candidate = op.And(candidate, op.Not(outlier))
        function = diversity_select(rounds=-(-counts.diverse // budget.batch), opset=facts.dialect.OPSET)
        diverse = op.call(function, tokens, candidate, reserved, [counts.diverse], batch=budget.batch)
        index = op.Concat(index, diverse, axis=1)

    # 5: Z = [sink ; RES ; DIV]
    if budget.order == "raster":
        index = ascending(graph, index, counts.reserve + counts.diverse)
    kept = gather_rows(graph, tokens, index)
    if counts.sink:
        _, first = op.TopK(norms, [1], axis=-1, largest=1, sorted=1, _outputs=2)
        kept = op.Concat(sink, kept, axis=1)
        index = op.Concat(first, index, axis=1)
    give_rows(graph, facts, kept, index, counts.kept)
    return graph
