"""SCOPE and MMTok: one token after the other, by how much it adds to what the kept ones cover.

Sources: Deng et al., "SCOPE: Saliency-Coverage Oriented Token Pruning for Efficient Multimodel LLMs" (NeurIPS 2025);
Dong et al., "MMTok: Multimodal Coverage Maximization for Efficient Inference of VLMs" (ICLR 2026); and the published
code of both. docs/method-choices.md has the differences.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import onnx_ir as ir

from sinkprune.contract.budgets import Budget
from sinkprune.export.graph import FLOAT, Graph
from sinkprune.export.methods.before_llm import Count, best_token, build_before, chosen_in_rounds
from sinkprune.export.pruning.functions import gathered, unit_rows
from sinkprune.export.pruning.plan import PlanFacts, VariableTokens
from sinkprune.export.pruning.sanitizer import TowerValues, rows_in_llm

TEXT_TEMPERATURE, TEXT_TEMPERATURE_OF_QWEN, VISUAL_TEMPERATURE = 0.02, 0.01, 0.2
"""The temperatures of MMTok's published code, for LLaVA, for Qwen, and of visual tokens."""
VISUAL_WEIGHT = 0.5
EQUAL = 2.0**-16
"""Gains that differ by no more are equal, as a share of the largest gain of the first round."""


def scope(facts: PlanFacts, kept: Budget, graph: Graph, features: TowerValues, k: Count) -> ir.Value:
    """Return [G,k]: the tokens of largest salience times gain of coverage, one after the other, ascending.

    The coverage of a set is the sum over all tokens of their largest cosine with a token of the set, at least 0.
    """
    op = graph.op
    unit = unit_rows(op, op.Cast(features.tokens, to=FLOAT))
    similar = op.MatMul(unit, op.Transpose(unit, perm=[0, 2, 1]))
    largest = op.ReduceMax(op.Abs(features.salience), [-1], keepdims=1)
    # Scaled, so that products stay in range.
    salience = op.Div(features.salience, op.Where(op.Greater(largest, 0.0), largest, 1.0))
    first = op.Mul(op.ReduceSum(op.Relu(similar), [-1], keepdims=0), salience)
    tolerance = op.Mul(op.ReduceMax(op.Abs(first), [-1], keepdims=1), EQUAL)
    free = op.Mul(salience, 0.0)
    covered = op.Unsqueeze(free, [1])
    fixed, state = [similar, salience, tolerance], [covered, free]
    return chosen_in_rounds(facts, kept, graph, "SaliencyCoverageRound", _salient_round, fixed, state, k)


def mmtok(facts: PlanFacts, kept: Budget, graph: Graph, features: TowerValues, k: Count) -> ir.Value:
    """Return [G,k]: the greedy maximum of the coverage of words and visual tokens over sets of k tokens, ascending.

    A set S covers a word, or a visual token, by max over j in S of its softmax over all N tokens j of cosine /
    temperature. The coverage is the mean over words plus `VISUAL_WEIGHT` times the mean over visual tokens. Words
    are compared with tokens as the LLM receives both, and tokens with each other as the tower gives them.
    """
    op = graph.op
    tokens, question = (unit_rows(op, rows) for rows in rows_in_llm(facts, graph, features))
    from_tower = unit_rows(op, op.Cast(features.tokens, to=FLOAT))
    of_qwen = isinstance(facts.tokens, VariableTokens) and kept.tower is None
    text_temperature = TEXT_TEMPERATURE_OF_QWEN if of_qwen else TEXT_TEMPERATURE
    words = _covers(op, op.MatMul(tokens, op.Transpose(question, perm=[1, 0])), text_temperature)
    others = _covers(op, op.MatMul(from_tower, op.Transpose(from_tower, perm=[0, 2, 1])), VISUAL_TEMPERATURE)
    cover = op.Concat(words, op.Mul(others, VISUAL_WEIGHT), axis=2)
    first = op.ReduceSum(cover, [-1], keepdims=0)
    tolerance = op.Mul(op.ReduceMax(first, [-1], keepdims=1), EQUAL)
    covered = op.Mul(op.ReduceMax(cover, [1], keepdims=1), 0.0)
    free = op.Mul(first, 0.0)
    return chosen_in_rounds(facts, kept, graph, "CoverageRound", _round, [cover, tolerance], [covered, free], k)


build_scope = partial(build_before, scope, "diverse")
build_mmtok = partial(build_before, mmtok, "diverse")


def _covers(op: Any, cosines: ir.Value, temperature: float) -> ir.Value:
    """Return [G,N,R]: how well each of N tokens covers each of R targets, from their `cosines` [G,N,R]; over R."""
    weights = op.Softmax(op.Div(cosines, temperature), axis=1)
    return op.Div(weights, op.Cast(op.Shape(cosines, start=2, end=3), to=FLOAT))


def _salient_round(
    op: Any,
    place: ir.Value,
    similar: ir.Value,
    salience: ir.Value,
    tolerance: ir.Value,
    covered: ir.Value,
    free: ir.Value,
) -> list[ir.Value]:
    """Write one round of SCOPE: the token of largest `salience` [G,N] times gain.

    `similar` [G,N,N] are cosines. All else is as in `_round`.
    """
    return _taken(op, place, similar, op.Mul(_gain(op, similar, covered), salience), tolerance, covered, free)


def _round(
    op: Any, place: ir.Value, cover: ir.Value, tolerance: ir.Value, covered: ir.Value, free: ir.Value
) -> list[ir.Value]:
    """Write one round of MMTok: the token that adds most to the coverage.

    `place` [N] numbers the tokens. `cover` [G,N,R] is the share of each target that each token covers, `tolerance`
    [G,1] how much equal gains differ, `covered` [G,1,R] what the tokens taken cover, and `free` [G,N] -inf for tokens
    taken and else 0. Returns the index taken [G,1], `covered` and `free`, updated.
    """
    return _taken(op, place, cover, _gain(op, cover, covered), tolerance, covered, free)


def _gain(op: Any, cover: ir.Value, covered: ir.Value) -> ir.Value:
    return op.ReduceSum(op.Relu(op.Sub(cover, covered)), [-1], keepdims=0)


def _taken(
    op: Any, place: ir.Value, cover: ir.Value, gain: ir.Value, tolerance: ir.Value, covered: ir.Value, free: ir.Value
) -> list[ir.Value]:
    index = best_token(op, op.Add(gain, free), tolerance)
    covered = op.Max(covered, gathered(op, cover, index))
    return [index, covered, op.Where(op.Equal(place, index), float("-inf"), free)]
