"""VisionZip, plain and after our high-norm filter ("VisionZip: Longer is Better but Not Necessary in Vision Language
Models").

SinkPruner's paper transfers the filter to VisionZip (docs/methods.md). Of k tokens 10/64, rounded down, are
contextual and the others dominant. VisionZip compares tokens by their attention keys; we compare the tokens
themselves. DeepStack features are gathered and merged with their tokens, and not compared.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from sinkprune.contract.budgets import Budget, Counts
from sinkprune.export.graph import FLOAT, Graph
from sinkprune.export.pruning.equal_mean import shares_of, tokens_into_llm
from sinkprune.export.pruning.functions import cosines, gathered, top_rho, unit_rows
from sinkprune.export.pruning.plan import (
    PlanFacts,
    PlanGraphs,
    TokenCount,
    UnreachableBudget,
    as_vector,
    sanitizer_counts,
)
from sinkprune.export.pruning.sanitizer import (
    TowerValues,
    ascending,
    in_every_group,
    largest,
    mask_of,
    new_sanitizer,
    output_rows,
    places,
    smallest,
)


def build(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """Return the plan that keeps dominant tokens by salience, and merges the others into contextual ones."""
    return _build(facts, replace(budget, sanitizer=True, remove_outliers=False), tokens_into_llm(facts, budget))


def build_filtered(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """Return the same plan for all but the top-rho tokens, which are neither kept nor merged."""
    removing = replace(budget, sanitizer=True, remove_outliers=True, aggregate=False)
    left = facts.nominal_tokens - removing.resolve(facts.nominal_tokens).outliers
    return _build(facts, removing, min(tokens_into_llm(facts, budget), left))


def _build(facts: PlanFacts, options: Budget, count: int) -> PlanGraphs:
    if count < 1:
        raise UnreachableBudget(f"of {facts.nominal_tokens} visual tokens the filter leaves none")
    contextual = count * 10 // 64
    kept = shares_of(facts, options, Counts(0, 0, reserve=count - contextual, diverse=contextual, stages=()))
    most = facts.most_counts(kept)
    facts.check_ranked(max(most.kept, facts.most_at_once(kept) - most.outliers - most.reserve))

    graph, features = new_sanitizer(facts, kept)
    op, salience, outlier = graph.op, features.salience, None
    counts = sanitizer_counts(op, facts, kept, features.norms)
    if most.outliers:
        function, per_mille = top_rho(facts.dialect.OPSET), kept.outlier_per_mille
        _, outlier = op.call(function, features.norms, features.tokens, per_mille=per_mille, _outputs=2)
        salience = op.Where(outlier, float("-inf"), salience)
    index = ascending(graph, largest(graph, salience, counts.reserve), counts.reserve)
    index = in_every_group(graph, features, index)
    rows = gathered(op, features.rows, index)
    if most.diverse:
        dropped = mask_of(graph, features, index)
        unmerged = dropped if outlier is None else op.Or(dropped, outlier)
        merged, targets = _merged(graph, features, unmerged, counts.others, counts.diverse)
        index, rows = op.Concat(index, targets, axis=1), op.Concat(rows, merged, axis=1)
    if kept.order == "raster":
        order = smallest(graph, op.Cast(index, to=FLOAT), op.Shape(index, start=1, end=2))
        index, rows = op.GatherElements(index, order, axis=1), gathered(op, rows, order)
    output_rows(graph, facts, kept, rows, index)
    return PlanGraphs(kept, graph)


def _merged(
    graph: Graph, features: TowerValues, taken: ir.Value, left: TokenCount, contextual: TokenCount
) -> tuple[ir.Value, ir.Value]:
    """Return the contextual rows [G,C,D'] and their index [G,C], of the `left` tokens of each group not in `taken`.

    Every `left // C`-th of these tokens is a target. Each other one belongs to the target that it is most similar to;
    a target is added the mean of its tokens. Sums are fp32.
    """
    op = graph.op
    tokens = op.Shape(features.norms, start=1, end=2)
    place = op.Cast(op.Range(0, op.Squeeze(tokens), 1), to=FLOAT)
    rest = smallest(graph, op.Where(taken, op.Cast(tokens, to=FLOAT), place), op.Max(as_vector(left), [1]))
    # At least one target, because ArgMax needs one; it is cut off below.
    some = op.Max(as_vector(contextual), [1])
    number = op.Range(0, op.Squeeze(some), 1)
    targets = op.Gather(rest, op.Mul(number, op.Div(as_vector(left), some)), axis=1)

    free = op.Not(op.Or(taken, mask_of(graph, features, targets)))
    sums, sizes = sums_of_similar(graph, features, targets, free)
    rows = op.Cast(features.rows, to=FLOAT)
    merged = op.Add(gathered(op, rows, targets), op.Div(sums, op.Max(sizes, 1.0)))
    merged, targets = (op.Slice(x, [0], as_vector(contextual), [1]) for x in (merged, targets))
    return op.CastLike(merged, features.tokens), targets


def sums_of_similar(
    graph: Graph, features: TowerValues, targets: ir.Value, free: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Return for each token of `targets` [G,C] the sum of the rows that join it, and their number.

    Each token of the mask `free` [G,N] joins the target that it is most similar to, by the cosine of `tokens`. Sums
    [G,C,D'] and numbers [G,C,1] are fp32.
    """
    op = graph.op
    number = places(graph, targets)
    unit = unit_rows(op, op.Cast(features.tokens, to=FLOAT))
    nearest = op.ArgMax(cosines(op, unit, targets), axis=-1, keepdims=1)
    joins = op.Equal(nearest, op.Unsqueeze(number, [0, 1]))
    member = op.Cast(op.And(joins, op.Unsqueeze(free, [-1])), to=FLOAT)
    sums = op.MatMul(op.Transpose(member, perm=[0, 2, 1]), op.Cast(features.rows, to=FLOAT))
    return sums, op.Unsqueeze(op.ReduceSum(member, [1], keepdims=0), [-1])
