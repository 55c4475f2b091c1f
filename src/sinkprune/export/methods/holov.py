"""HoloV: gives each part of the picture its share of the tokens, by its salience.

Source: Zou et al., "Don't Just Chase 'Highlighted Tokens' in MLLMs: Revisiting Visual Holistic Context Retention"
(NeurIPS 2025), and its published code. docs/method-choices.md has the differences.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import onnx_ir as ir

from sinkprune.contract.budgets import Budget
from sinkprune.export.graph import Graph
from sinkprune.export.methods.before_llm import Count, build_before
from sinkprune.export.pruning.functions import unit_rows
from sinkprune.export.pruning.plan import PlanFacts, as_vector
from sinkprune.export.pruning.sanitizer import TowerValues, ascending, largest, places

PARTS = 16
"""The parts of a picture: runs of tokens in raster order. The first are longer by a token if they are not equal."""
DIVERSITY = 0.09
"""The weight of a part's diversity, next to its salience."""
LEAST = 1e-6
"""The variance of similarities that counts as none."""
WHOLE = 2.0**-10
"""What a share may lack of a whole token, so that rounding decides nothing."""
STEPS = 2.0**12
"""Shares are ranked in steps of a 4096th."""

_FLOAT, _INT64, _BOOL = ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.BOOL


def holov(facts: PlanFacts, kept: Budget, graph: Graph, features: TowerValues, k: Count) -> ir.Value:
    """Return [G,k]: the most salient tokens of each part, as many as its share, ascending.

    A part's share is that of its weight, rounded down. Parts of largest weight get the rest, one token each. If parts
    have fewer tokens than their share, the most salient other tokens take the places.
    """
    facts.check_ranked(facts.most_at_once(kept))
    op, count = graph.op, k()
    tokens = op.Shape(features.norms, start=1, end=2)
    largest_salience = op.ReduceMax(op.Abs(features.salience), [-1], keepdims=1)
    # Scaled, so that sums stay in range.
    salience = op.Div(features.salience, op.Where(op.Greater(largest_salience, 0.0), largest_salience, 1.0))
    numbers = op.Constant(value_ints=[*range(PARTS)])
    part = _part_of_each(graph, features, tokens)
    member = op.Equal(op.Unsqueeze(part, [0]), op.Unsqueeze(numbers, [1]))
    weight = _weights(graph, features, salience, part, op.Cast(member, to=_FLOAT))

    share = op.Div(weight, op.Max(op.ReduceSum(weight, [-1], keepdims=1), 1e-30))
    wanted = op.Constant(value_ints=as_vector(count)) if isinstance(count, int) else count
    whole = op.Cast(op.Floor(op.Add(op.Mul(share, op.Cast(wanted, to=_FLOAT)), WHOLE)), to=_INT64)
    rest = op.Sub(wanted, op.ReduceSum(whole, [-1], keepdims=1))
    _, order = op.TopK(op.Round(op.Mul(share, STEPS)), [PARTS], axis=-1, largest=1, sorted=1, _outputs=2)
    one_more = op.Cast(op.Less(op.Unsqueeze(numbers, [0]), rest), to=_INT64)
    allotted = op.Add(whole, op.ScatterElements(op.Mul(whole, 0), order, one_more, axis=1))

    ranked = op.Where(op.Unsqueeze(member, [0]), op.Unsqueeze(salience, [1]), float("-inf"))
    _, best = op.TopK(ranked, tokens, axis=-1, largest=1, sorted=1, _outputs=2)
    within = op.Cast(op.Less(places(graph, salience), op.Unsqueeze(allotted, [2])), to=_INT64)
    marks = op.ScatterElements(op.Expand(0, op.Shape(ranked)), best, op.Expand(within, op.Shape(best)), axis=2)
    chosen = op.And(op.Cast(marks, to=_BOOL), op.Unsqueeze(member, [0]))
    taken = op.Cast(op.ReduceMax(op.Cast(chosen, to=_FLOAT), [1], keepdims=0), to=_BOOL)
    return ascending(graph, largest(graph, op.Where(taken, float("inf"), salience), count), count)


build = partial(build_before, holov, "diverse")


def _part_of_each(graph: Graph, features: TowerValues, tokens: ir.Value) -> ir.Value:
    """Return [N] int64: the part of each of the `tokens` [1]."""
    op = graph.op
    place, size = places(graph, features.norms), op.Div(tokens, [PARTS])
    longer = op.Sub(tokens, op.Mul(size, [PARTS]))
    # The first parts have a token more.
    end = op.Mul(longer, op.Add(size, [1]))
    early = op.Div(place, op.Add(size, [1]))
    late = op.Add(op.Div(op.Sub(place, end), op.Max(size, [1])), longer)
    return op.Where(op.Less(place, end), early, late)


def _weights(graph: Graph, features: TowerValues, salience: ir.Value, part: ir.Value, member: ir.Value) -> ir.Value:
    """Return [G,P]: the mean salience of each part, times 1 plus `DIVERSITY` if similarities within it vary.

    `salience` [G,N] is scaled to 1, `part` [N] is the part of each token, and `member` [P,N] is 1 for its tokens.
    """
    op: Any = graph.op
    unit = unit_rows(op, op.Cast(features.tokens, to=_FLOAT))
    place = places(graph, features.norms)
    same = op.Equal(op.Unsqueeze(part, [0]), op.Unsqueeze(part, [1]))
    others = op.And(same, op.Not(op.Equal(op.Unsqueeze(place, [0]), op.Unsqueeze(place, [1]))))
    similar = op.Where(others, op.MatMul(unit, op.Transpose(unit, perm=[0, 2, 1])), 0.0)
    size = op.ReduceSum(member, [1], keepdims=0)
    # The other tokens of each token's part; 1 for a token alone, whose sums are 0.
    partners = op.Max(op.ReduceSum(op.Cast(others, to=_FLOAT), [1], keepdims=0), 1.0)
    mean = op.Div(op.ReduceSum(similar, [-1], keepdims=1), op.Unsqueeze(partners, [1]))
    apart = op.Where(same, op.Sub(similar, mean), 0.0)
    variance = op.Div(op.ReduceSumSquare(apart, [-1], keepdims=0), partners)

    def mean_of_parts(values: ir.Value) -> ir.Value:
        return op.Div(op.MatMul(values, op.Transpose(member, perm=[1, 0])), op.Max(size, 1.0))

    varied = mean_of_parts(variance)
    return op.Mul(mean_of_parts(salience), op.Add(op.Mul(op.Div(varied, op.Add(varied, LEAST)), DIVERSITY), 1.0))
