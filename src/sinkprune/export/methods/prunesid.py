"""PruneSID: groups by principal components, and the most salient of each group without near-duplicates ("Prune
Redundancy, Preserve Essence: Vision Token Compression in VLMs via Synergistic Importance-Diversity").

1. Each token joins the principal component on which its weight is largest, of the sigmoid of X, centred by token.
   There is a component for every 4 kept tokens, at most `COMPONENTS`.
2. In each group, from the most salient token on, a token is suppressed if its cosine with a token that was not is
   above k/32 times the mean cosine of two tokens.
3. Each group keeps a token, and of the others a share by the number of its tokens that are not suppressed, the most
   salient first. If all of these are too few, the most salient suppressed tokens follow.

No ONNX operator decomposes a matrix. Components are columns after `ITERATIONS` subspace iterations with Gram-Schmidt,
which start from evenly spaced tokens. docs/methods.md lists all differences from the published code.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import onnx_ir as ir

from sinkprune.contract.budgets import Budget
from sinkprune.export.graph import FLOAT, INT64, Graph
from sinkprune.export.methods.before_llm import Count, build_before
from sinkprune.export.pruning.functions import unit_rows
from sinkprune.export.pruning.plan import PlanFacts, as_vector
from sinkprune.export.pruning.sanitizer import TowerValues, ascending, largest, places

COMPONENTS = 16
"""The most components. Each takes about 3.5 kB of graph. The published code has k/4: 16 for 64 kept tokens."""
ITERATIONS = 3
SUPPRESSIONS = 16
"""The rounds that decide who is suppressed: exact, if no longer chain of tokens decides on each other."""
MARGIN = 2.0**-12
"""Differences of cosines and, for each component before, of weights that do not count: rounding is smaller."""
RESIDUAL = 1e-3
"""A column of which Gram-Schmidt leaves less than this share depends on the columns before, and becomes zero."""
_TINY = 1e-30


def prunesid(facts: PlanFacts, kept: Budget, graph: Graph, features: TowerValues, k: Count) -> ir.Value:
    """Return the index of the k tokens that groups keep, ascending."""
    most = facts.most_counts(kept).kept
    facts.check_ranked(most)
    count, width = k(), max(1, min(COMPONENTS, most // 4))
    op, wanted = graph.op, graph.op.Max(as_vector(count), [1])
    group = _component(graph, features, wanted, width)
    same = op.Equal(op.Unsqueeze(group, [2]), op.Unsqueeze(group, [1]))
    first = _before(graph, features)
    rivals = op.And(same, first)
    free = _not_suppressed(graph, features, rivals, first, wanted)
    picked = _picked(graph, group, rivals, free, wanted, width)
    return ascending(graph, largest(graph, op.Where(picked, float("inf"), features.salience), count), count)


build = partial(build_before, prunesid, "diverse")


def _component(graph: Graph, features: TowerValues, count: ir.Value, width: int) -> ir.Value:
    """Return [G,N] int64: the component of each token, of `width` or of a quarter of `count` if that is less."""
    op = graph.op
    x = op.Sigmoid(op.Cast(features.tokens, to=FLOAT))
    x = op.Sub(x, op.ReduceMean(x, [2], keepdims=1))
    x = op.Div(x, op.Max(op.ReduceL2(x, [1, 2], keepdims=1), _TINY))
    across = op.Transpose(x, perm=[0, 2, 1])

    tokens, number = op.Shape(features.norms, start=1, end=2), op.Range(0, width, 1)
    used = op.Min(op.Max(op.Div(count, [4]), [1]), [width])
    start = op.Min(op.Div(op.Mul(number, tokens), used), op.Sub(tokens, [1]))
    # [G,D,C]: the start, or columns of weights multiplied by the tokens
    directions = op.Where(op.Less(number, used), op.Gather(across, start, axis=2), 0.0)
    columns = _orthonormal(op, op.MatMul(x, directions), width)
    for _ in range(ITERATIONS - 1):
        columns = _orthonormal(op, op.MatMul(x, op.MatMul(across, columns)), width)
    # Later components count less by a margin, so that rounding decides no tie.
    weights = op.Constant(value_floats=[1.0 - MARGIN * place for place in range(width)])
    return op.ArgMax(op.Mul(op.Abs(columns), weights), axis=2, keepdims=0)


def _orthonormal(op: Any, columns: ir.Value, width: int) -> ir.Value:
    """Return the columns of [G,N,C] after Gram-Schmidt: of length 1, or 0 where they depend on columns before."""
    lengths = op.ReduceL2(columns, [1], keepdims=1)
    least = op.Add(op.Mul(lengths, RESIDUAL), _TINY)
    leasts = op.Split(least, [1] * width, axis=2, _outputs=width) if width > 1 else [least]
    units: list[ir.Value] = []
    for left in range(width - 1, -1, -1):
        column = columns
        if left:
            column, columns = op.Split(columns, [1, left], axis=2, _outputs=2)
        length = op.ReduceL2(column, [1], keepdims=1)
        enough = op.Greater(length, leasts[len(units)])
        # Division by infinity makes a dependent column zero.
        units.append(op.Div(column, op.Where(enough, length, float("inf"))))
        if left:
            shares = op.MatMul(op.Transpose(units[-1], perm=[0, 2, 1]), columns)
            columns = op.Sub(columns, op.MatMul(units[-1], shares))
    return op.Concat(*units, axis=2) if width > 1 else units[0]


def _before(graph: Graph, features: TowerValues) -> ir.Value:
    """Return [G,N,N] bool: for each token the tokens of larger salience, or of the same and a lower index."""
    op = graph.op
    own, other = op.Unsqueeze(features.salience, [2]), op.Unsqueeze(features.salience, [1])
    place = places(graph, features.norms)
    earlier = op.Less(op.Unsqueeze(place, [0]), op.Unsqueeze(place, [1]))
    return op.Or(op.Greater(other, own), op.And(op.Equal(other, own), earlier))


def _not_suppressed(
    graph: Graph, features: TowerValues, rivals: ir.Value, first: ir.Value, count: ir.Value
) -> ir.Value:
    """Return [G,N,1] fp32: 1 for each token that no more salient one of its group suppresses, else 0."""
    op = graph.op
    unit = unit_rows(op, op.Cast(features.tokens, to=FLOAT))
    similarity = op.MatMul(unit, op.Transpose(unit, perm=[0, 2, 1]))
    tokens = op.Cast(op.Shape(features.norms, start=1, end=2), to=FLOAT)
    pairs = op.Max(op.Div(op.Mul(tokens, op.Sub(tokens, 1.0)), 2.0), 1.0)
    # Of each pair one token is first.
    mean = op.Div(op.ReduceSum(op.Where(first, similarity, 0.0), [1, 2], keepdims=1), pairs)
    threshold = op.Add(op.Mul(mean, op.Div(op.Cast(count, to=FLOAT), 32.0)), MARGIN)
    suppresses = op.Cast(op.And(rivals, op.Greater(similarity, threshold)), to=FLOAT)
    free = op.Expand(1.0, op.Shape(op.Unsqueeze(features.norms, [2])))
    for _ in range(SUPPRESSIONS):
        # 1 for a sum of 0, and 0 for 1 and more
        free = op.HardSigmoid(op.MatMul(suppresses, free), alpha=-1.0, beta=1.0)
    return free


def _picked(graph: Graph, group: ir.Value, rivals: ir.Value, free: ir.Value, count: ir.Value, width: int) -> ir.Value:
    """Return the mask [G,N] of the tokens that groups keep: `count` of those that are free, or all of these.

    `group` [G,N] is that of each token, `rivals` [G,N,N] those of its group that come first, and `free` [G,N,1] is 1
    for tokens that are not suppressed.
    """
    op = graph.op
    member = op.Equal(op.Unsqueeze(group, [1]), op.Unsqueeze(op.Range(0, width, 1), [1]))
    alive = op.Transpose(free, perm=[0, 2, 1])
    found = op.Cast(op.ReduceSum(op.Where(member, alive, 0.0), [2], keepdims=1), to=INT64)
    one = op.Min(found, 1)
    more = op.Sub(found, one)
    # The first of each group are counted apart, the others divided by the running share. If more are wanted than are
    # free, shares exceed the groups, which then keep all their free tokens.
    wanted = op.Sub(count, _total(op, one))
    earlier = op.Less(op.Range(0, width, 1), op.Unsqueeze(op.Range(0, width, 1), [1]))
    flat = op.Cast(op.Transpose(more, perm=[0, 2, 1]), to=FLOAT)
    until = op.Cast(op.ReduceSum(op.Where(earlier, flat, 0.0), [2], keepdims=1), to=INT64)
    all_more = op.Max(_total(op, more), 1)

    def divided(x: ir.Value) -> ir.Value:
        return op.Div(op.Mul(x, wanted), all_more)

    share = op.Add(one, op.Sub(divided(op.Add(until, more)), divided(until)))
    own = op.ReduceSum(op.Where(member, op.Cast(share, to=FLOAT), 0.0), [1], keepdims=0)
    rank = op.ReduceSum(op.Where(rivals, alive, 0.0), [2], keepdims=0)
    return op.And(op.Less(rank, own), op.Greater(op.Squeeze(alive, [1]), 0.5))


def _total(op: Any, counts: ir.Value) -> ir.Value:
    return op.Cast(op.ReduceSum(op.Cast(counts, to=FLOAT), [1], keepdims=1), to=INT64)
