"""VisionZip ("VisionZip: Longer is Better but Not Necessary in Vision Language Models"), and the same behind our
high-norm filter, as SinkPruner's paper transfers it (method.md section 6).

Of k tokens 10/64, rounded down, are contextual and the others dominant. VisionZip compares tokens by their attention
keys; we have the tokens themselves.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from sinkprune.contract.budgets import Budget, Counts
from sinkprune.export.graph import Graph
from sinkprune.export.pruning.equal_mean import UnreachableMean, tokens_into_llm
from sinkprune.export.pruning.functions import cosines, top_rho, unit_rows
from sinkprune.export.pruning.plan import PlanFacts, PlanGraphs
from sinkprune.export.pruning.sanitizer import (
    Features,
    ascending,
    gather_rows,
    give_rows,
    in_every_group,
    largest,
    mask_of,
    new_sanitizer,
    smallest,
)

_FLOAT = ir.DataType.FLOAT


def build(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """Dominant tokens by salience; the others merged into contextual ones."""
    return _build(facts, budget, outliers=0)


def build_filtered(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """The same of what the top-rho tokens leave: they are neither kept nor merged."""
    removing = replace(budget, sanitizer=True, remove_outliers=True)
    return _build(facts, budget, removing.resolve(facts.visual_tokens).outliers)


METHODS = {"visionzip": build, "visionzip+filter": build_filtered}


def _build(facts: PlanFacts, budget: Budget, outliers: int) -> PlanGraphs:
    count = min(tokens_into_llm(facts, budget), facts.visual_tokens - outliers)
    if count < 1:
        raise UnreachableMean(f"of {facts.visual_tokens} visual tokens the filter leaves none")
    contextual = count * 10 // 64
    dominant = count - contextual
    graph, features = new_sanitizer(facts)
    op, salience, outlier = graph.op, features.salience, None
    if outliers:
        per_mille = budget.outlier_per_mille
        function = top_rho(facts.dialect.OPSET)
        _, outlier = op.call(function, features.norms, features.tokens, per_mille=per_mille, _outputs=2)
        salience = op.Where(outlier, float("-inf"), salience)
    index = in_every_group(graph, features, ascending(graph, largest(graph, salience, dominant), dominant))
    rows = gather_rows(graph, features.tokens, index)
    if contextual:
        dropped = mask_of(graph, features, index)
        unmerged = op.Or(dropped, outlier) if outliers else dropped
        left = facts.visual_tokens - outliers - dominant
        merged, targets = _merged(graph, facts, features, unmerged, left, contextual)
        index, rows = op.Concat(index, targets, axis=1), op.Concat(rows, merged, axis=1)
    if budget.order == "raster":
        order = smallest(graph, op.Cast(index, to=_FLOAT), count)
        index, rows = op.GatherElements(index, order, axis=1), gather_rows(graph, rows, order)
    give_rows(graph, facts, rows, index, count)
    return PlanGraphs(Counts(outliers, sink=0, reserve=dominant, diverse=contextual, stages=()), graph)


def _merged(
    graph: Graph, facts: PlanFacts, features: Features, taken: ir.Value, left: int, contextual: int
) -> tuple[ir.Value, ir.Value]:
    """The contextual tokens [G,C,D] and their index [G,C], of the `left` tokens of each group not in `taken` [G,N].

    Every `left // C`-th of these is a target. To it is added the mean of those of the others that are most similar
    to it. Sums are fp32.
    """
    op, n = graph.op, facts.visual_tokens
    place = op.Cast(op.Range(0, n, 1), to=_FLOAT)
    rest = smallest(graph, op.Where(taken, float(n), place), left)
    targets = op.Gather(rest, [number * (left // contextual) for number in range(contextual)], axis=1)

    tokens = op.Cast(features.tokens, to=_FLOAT)
    nearest = op.ArgMax(cosines(op, unit_rows(op, tokens), targets), axis=-1, keepdims=1)
    joins = op.Equal(nearest, op.Unsqueeze(op.Range(0, contextual, 1), [0, 1]))
    free = op.Not(op.Or(taken, mask_of(graph, features, targets)))
    member = op.Cast(op.And(joins, op.Unsqueeze(free, [-1])), to=_FLOAT)
    sums = op.MatMul(op.Transpose(member, perm=[0, 2, 1]), tokens)
    sizes = op.Unsqueeze(op.ReduceSum(member, [1], keepdims=0), [-1])
    merged = op.Add(gather_rows(graph, tokens, targets), op.Div(sums, op.Max(sizes, 1.0)))
    return op.CastLike(merged, features.tokens), targets
