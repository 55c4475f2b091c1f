"""CDPruner: keeps tokens that are relevant to the question and unlike each other, by a determinantal point process.

Source: Zhang et al., "Beyond Attention or Similarity: Maximizing Conditional Diversity for Token Pruning in MLLMs"
(NeurIPS 2025), and its published code for LLaVA. docs/method-choices.md has the differences.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import onnx_ir as ir

from sinkprune.contract.budgets import Budget
from sinkprune.export.graph import Graph
from sinkprune.export.methods.before_llm import Count, best_token, build_before, chosen_in_rounds
from sinkprune.export.pruning.functions import centred, gathered, unit_rows
from sinkprune.export.pruning.plan import PlanFacts
from sinkprune.export.pruning.sanitizer import TowerValues, mean_cosines, rows_in_llm

EQUAL = 2.0**-18
"""Relevances, and gains of at most 1, that differ by no more are equal."""


def cdpruner(
    facts: PlanFacts, kept: Budget, graph: Graph, features: TowerValues, k: Count, centring: bool = False
) -> ir.Value:
    """Return [G,k]: the greedy maximum of det(L') over sets of k tokens, in ascending order.

    L' = diag(r) L diag(r) [G,N,N]. L are the cosines of the tokens as the LLM receives them. The relevance r [G,N] is
    the mean cosine of a token with the words of the question, scaled to 0 to 1; 1 if all are equally relevant.

    With `centring`, the rule of Cen-Prune: L are cosines of centred tokens, and r is multiplied by distinctiveness.
    """
    op = graph.op
    rows, question = rows_in_llm(facts, graph, features)
    quality = _scaled(op, mean_cosines(op, unit_rows(op, rows), unit_rows(op, question)))
    if centring:
        rows, distinctive = centred(op, rows)
        quality = op.Mul(quality, distinctive)
    weighted = op.Mul(unit_rows(op, rows), op.Unsqueeze(quality, [2]))
    kernel = op.MatMul(weighted, op.Transpose(weighted, perm=[0, 2, 1]))
    gain = op.ReduceSumSquare(weighted, [-1], keepdims=0)
    # A row of zeros stands for the factor before the first round.
    factor = op.Unsqueeze(op.Mul(gain, 0.0), [1])
    return chosen_in_rounds(facts, kept, graph, "DeterminantRound", _round, [kernel], [factor, gain], k)


build = partial(build_before, cdpruner, "diverse")
build_centred = partial(build_before, partial(cdpruner, centring=True), "diverse")


def _scaled(op: Any, values: ir.Value) -> ir.Value:
    """Return `values` [G,N] scaled so that they go from 0 to 1 over each group; 1 if all are equal."""
    least = op.ReduceMin(values, [-1], keepdims=1)
    spread = op.Sub(op.ReduceMax(values, [-1], keepdims=1), least)
    differ = op.Greater(spread, EQUAL)
    return op.Where(differ, op.Div(op.Sub(values, least), op.Where(differ, spread, 1.0)), 1.0)


def _round(op: Any, place: ir.Value, kernel: ir.Value, factor: ir.Value, gain: ir.Value) -> list[ir.Value]:
    """Write one round of the incremental Cholesky factorisation (Chen et al., 2018).

    `place` [N] numbers the tokens. `factor` [G,i,N] are the rows of the Cholesky factor of the tokens that earlier
    rounds took. `gain` [G,N] is the factor by which a token enlarges the determinant, and -inf for tokens taken.
    Returns the index taken [G,1], `factor` and `gain`, updated. A token without gain leaves both as they are.
    """
    index = best_token(op, gain, EQUAL)
    taken = op.Equal(place, index)
    own = op.MatMul(factor, op.Unsqueeze(op.Cast(taken, to=ir.DataType.FLOAT), [2]))
    rest = op.Sub(gathered(op, kernel, index), op.MatMul(op.Transpose(own, perm=[0, 2, 1]), factor))
    pivot = op.GatherElements(gain, index, axis=1)
    root = op.Sqrt(op.Where(op.Greater(pivot, EQUAL), pivot, float("inf")))
    added = op.Div(rest, op.Unsqueeze(root, [2]))
    flat = op.Squeeze(added, [1])
    left = op.Where(taken, float("-inf"), op.Sub(gain, op.Mul(flat, flat)))
    return [index, op.Concat(factor, added, axis=1), left]
