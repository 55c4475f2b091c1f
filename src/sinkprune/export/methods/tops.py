"""TOPS: keeps tokens that are relevant, cover the others and differ from each other, before the LLM and within it.

Source: Wang et al., "TOPS: First-Principles Visual Token Pruning via Constructing Token Optimal Preservation Sets for
Efficient MLLM Inference" (arXiv 2606.27161). docs/method-choices.md has the differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from sinkprune.contract.budgets import Budget, Share, scaled_layers
from sinkprune.export.graph import BOOL, FLOAT, INT64, Graph
from sinkprune.export.methods.before_llm import best_token
from sinkprune.export.methods.in_llm import text_like_the_image
from sinkprune.export.pruning.equal_mean import half_and_eighth
from sinkprune.export.pruning.functions import ROUNDS, SAME, gathered, local_function, unit_rows
from sinkprune.export.pruning.plan import PlanFacts, PlanGraphs, sanitizer_counts
from sinkprune.export.pruning.sanitizer import new_sanitizer, output_tokens, places, smallest
from sinkprune.export.pruning.select import (
    SelectionRule,
    Stage,
    Survivors,
    build_selects,
    count_of_one_image,
    quotas_of_images,
)

DIVERSITY, COVERAGE = 0.5, 0.5
"""The weights of two of the three criteria: alpha and lambda of the paper."""
EQUAL = 2.0**-12
"""Scores that differ by no more are equal."""
LEAST_SPREAD = 2.0**-10
"""A criterion whose values differ by less is not scaled up to 1, so that rounding does not choose."""


def build(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """Return the plan of a sanitizer and two stages, which meet the budget's mean together.

    The relevance is the salience before the LLM, and in it the attention of the text rows that are like the image.
    """
    cuts = scaled_layers((12, 24), facts.language_model.num_layers)
    kept = replace(half_and_eighth(facts, budget, cuts), sanitizer=True, remove_outliers=False)
    selects = build_selects(facts, kept, cuts, text_like_the_image, rule=_rule)
    return PlanGraphs(kept, _sanitizer(facts, kept), selects)


def _sanitizer(facts: PlanFacts, kept: Budget) -> Graph:
    graph, features = new_sanitizer(facts, kept)
    op, count = graph.op, sanitizer_counts(graph.op, facts, kept, features.norms).diverse
    member = op.Cast(op.Expand(1, op.Shape(features.norms)), to=BOOL)
    chosen = _chosen(graph, facts, features.tokens, features.salience, member, count, facts.most_counts(kept).kept)
    place = op.Where(chosen, op.Cast(places(graph, features.norms), to=FLOAT), float("inf"))
    output_tokens(graph, facts, kept, features, smallest(graph, place, count))
    return graph


def _rule(facts: PlanFacts, kept: int | Share) -> SelectionRule:
    """Return the choice of a stage, among the hidden states of `kept` of one image, or of the quota of each image."""

    def choose(graph: Graph, stage: Stage, scores: ir.Value) -> Survivors:
        op, rows = graph.op, graph.op.Gather(stage.hidden, stage.visual, axis=1)
        left: ir.Value
        if facts.images > 1:
            member, count, left = quotas_of_images(graph, facts.images)
            rows = op.Expand(rows, [facts.images, 1, 1])
        else:
            count = left = count_of_one_image(graph, scores, kept, facts.visual_dim)
            member = op.Cast(op.Expand(1, op.Concat([1], op.Shape(scores), axis=0)), to=BOOL)
        most = kept if isinstance(kept, int) else kept.of(facts.most_visual_tokens)
        chosen = _chosen(graph, facts, rows, op.Unsqueeze(scores, [0]), member, count, most)
        return Survivors(op.ReduceMax(op.Cast(chosen, to=INT64), [0], keepdims=0), left)

    return choose


def _chosen(
    graph: Graph,
    facts: PlanFacts,
    rows: ir.Value,
    relevance: ir.Value,
    member: ir.Value,
    count: ir.Value | int,
    most: int,
) -> ir.Value:
    """Return the mask [G,N] of `count` rows of each group of the [G,N,D] `rows`, one round for each of `most`.

    `relevance` [G,N] or [1,N] is the first criterion, `member` [G,N] is True for the rows of each group, and `count`
    is [1] or [G,1].
    """
    facts.check_rounds(most)
    op, place = graph.op, places(graph, member)
    unit = unit_rows(op, op.Cast(rows, to=FLOAT))
    similar = op.Min(op.MatMul(unit, op.Transpose(unit, perm=[0, 2, 1])), SAME)
    largest = op.ReduceMax(op.Abs(relevance), [-1], keepdims=1)
    free = op.Where(member, 0.0, float("-inf"))
    # First to 1 at most, so that differences stay in range.
    relevance = _scaled(op, op.Div(relevance, op.Where(op.Greater(largest, 0.0), largest, 1.0)), free, 1e-30)
    left = op.Cast(op.Constant(value_ints=[count]) if isinstance(count, int) else count, to=FLOAT)
    # Rows of other groups are covered from the start.
    closest = op.Where(member, -1.0, 2.0)
    # The first row is the most relevant.
    state = _taken(op, place, similar, op.Add(relevance, free), closest, free, left)
    function = local_function(ROUNDS, "OptimalPreservationRound", _round, facts.dialect.OPSET)
    for _ in range(most - 1):
        state = op.call(function, place, similar, relevance, *state)
    return op.And(member, op.Less(state[1], 0.0))


def _round(
    op: Any,
    place: ir.Value,
    similar: ir.Value,
    relevance: ir.Value,
    closest: ir.Value,
    free: ir.Value,
    left: ir.Value,
) -> Sequence[ir.Value]:
    """Write one round: the row of largest relevance plus weighted coverage and diversity, each scaled to 0 to 1.

    `place` [N] numbers the rows. `similar` [G,N,N] are cosines, `relevance` [G,N] is scaled. The state: `closest`
    [G,N] is each row's largest cosine with a row taken, `free` [G,N] -inf for rows taken and else 0, and `left`, [1]
    or [G,1], how many are still to be taken. Returns the new state.
    """
    gain = op.ReduceSum(op.Relu(op.Sub(similar, op.Unsqueeze(closest, [1]))), [-1], keepdims=0)
    coverage = op.Mul(_scaled(op, gain, free, LEAST_SPREAD), COVERAGE)
    diversity = op.Mul(_scaled(op, op.Sub(1.0, closest), free, LEAST_SPREAD), DIVERSITY)
    score = op.Add(op.Add(relevance, coverage), op.Add(diversity, free))
    return _taken(op, place, similar, score, closest, free, left)


def _taken(
    op: Any, place: ir.Value, similar: ir.Value, score: ir.Value, closest: ir.Value, free: ir.Value, left: ir.Value
) -> Sequence[ir.Value]:
    """Return the state after the row of best `score` [G,N] is taken, where one is still to be taken."""
    index = best_token(op, score, EQUAL)
    closest = op.Max(closest, op.Squeeze(gathered(op, similar, index), [1]))
    taken = op.And(op.Equal(place, index), op.Greater(left, 0.0))
    return closest, op.Where(taken, float("-inf"), free), op.Sub(left, 1.0)


def _scaled(op: Any, values: ir.Value, free: ir.Value, least: float) -> ir.Value:
    """Return `values` [G,N] scaled so that those of free rows go from 0 to 1; to less, if their spread is below
    `least`."""
    low = op.ReduceMin(op.Sub(values, free), [-1], keepdims=1)
    high = op.ReduceMax(op.Add(values, free), [-1], keepdims=1)
    return op.Div(op.Sub(values, low), op.Max(op.Sub(high, low), least))
