"""SCOPE: keeps tokens that are salient and cover the others.

Source: Deng et al., "SCOPE: Saliency-Coverage Oriented Token Pruning for Efficient Multimodel LLMs" (NeurIPS 2025),
and its published code for LLaVA. docs/method-choices.md has the differences.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import onnx_ir as ir

from sinkprune.contract.budgets import Budget
from sinkprune.export.graph import Graph
from sinkprune.export.methods.before_llm import Count, best_token, build_before, chosen_in_rounds
from sinkprune.export.pruning.functions import gathered, unit_rows
from sinkprune.export.pruning.plan import PlanFacts
from sinkprune.export.pruning.sanitizer import TowerValues

EQUAL = 2.0**-16
"""Gains that differ by no more are equal, as a share of the largest gain of the first round."""

_FLOAT = ir.DataType.FLOAT


def scope(facts: PlanFacts, kept: Budget, graph: Graph, features: TowerValues, k: Count) -> ir.Value:
    """Return [G,k]: the tokens of largest salience times gain of coverage, one after the other, ascending.

    The coverage of a set is the sum over all tokens of their largest cosine with a token of the set, at least 0.
    """
    op = graph.op
    unit = unit_rows(op, op.Cast(features.tokens, to=_FLOAT))
    similar = op.MatMul(unit, op.Transpose(unit, perm=[0, 2, 1]))
    largest = op.ReduceMax(op.Abs(features.salience), [-1], keepdims=1)
    # Scaled, so that products stay in range.
    salience = op.Div(features.salience, op.Where(op.Greater(largest, 0.0), largest, 1.0))
    first = op.Mul(op.ReduceSum(op.Relu(similar), [-1], keepdims=0), salience)
    tolerance = op.Mul(op.ReduceMax(op.Abs(first), [-1], keepdims=1), EQUAL)
    free = op.Mul(salience, 0.0)
    covered = op.Unsqueeze(free, [1])
    fixed, state = [similar, salience, tolerance], [covered, free]
    return chosen_in_rounds(facts, kept, graph, "SaliencyCoverageRound", _round, fixed, state, k)


build = partial(build_before, scope, "diverse")


def _round(
    op: Any,
    place: ir.Value,
    similar: ir.Value,
    salience: ir.Value,
    tolerance: ir.Value,
    covered: ir.Value,
    free: ir.Value,
) -> list[ir.Value]:
    """Write one round: the token of largest salience times gain.

    `place` [N] numbers the tokens. `similar` [G,N,N] are cosines, `salience` [G,N] is scaled to 1, `tolerance` [G,1]
    is how much equal gains differ, `covered` [G,1,N] the coverage of each token, and `free` [G,N] -inf for tokens
    taken and else 0. Returns the index taken [G,1], `covered` and `free`, updated.
    """
    gain = op.ReduceSum(op.Relu(op.Sub(similar, covered)), [-1], keepdims=0)
    index = best_token(op, op.Add(op.Mul(gain, salience), free), tolerance)
    covered = op.Max(covered, gathered(op, similar, index))
    return [index, covered, op.Where(op.Equal(place, index), float("-inf"), free)]
