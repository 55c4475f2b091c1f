"""VisPruner: keeps the most salient tokens, and of the others those without near-duplicates.

Source: Zhang et al., "Beyond Text-Visual Attention: Exploiting Visual Cues for Effective Token Pruning in VLMs"
(ICCV 2025), and its published code for LLaVA. docs/method-choices.md has the differences.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from sinkprune.contract.budgets import Budget, Counts
from sinkprune.export.graph import BOOL, FLOAT, INT64
from sinkprune.export.pruning.equal_mean import kept_before, tokens_into_llm
from sinkprune.export.pruning.functions import ROUNDS, gathered, local_function, unit_rows
from sinkprune.export.pruning.plan import PlanFacts, PlanGraphs, as_vector, sanitizer_counts
from sinkprune.export.pruning.sanitizer import ascending, largest, new_sanitizer, output_tokens

AT_ONCE = 8
"""The most tokens that a round drops."""
SAME = 1.0 - 2.0**-18
"""Larger cosines count as equal, so that copies of a token tie."""


def build(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """Return the plan: half of the tokens, rounded down, by salience, and the others by matching."""
    count = tokens_into_llm(facts, budget)
    kept = kept_before(facts, budget, reserve=count // 2, diverse=count - count // 2)
    most = facts.most_counts(kept)
    # The first round ranks half of the tokens that are left.
    facts.check_ranked(max(facts.most_at_once(kept), most.kept))
    graph, features = new_sanitizer(facts, kept)
    op, counts = graph.op, sanitizer_counts(graph.op, facts, kept, features.norms)
    tokens = op.Shape(features.norms, start=1, end=2)
    order = largest(graph, features.salience, tokens)
    reserve = as_vector(counts.reserve)
    salient, rest = op.Slice(order, [0], reserve, [1]), op.Slice(order, reserve, tokens, [1])
    unit = unit_rows(op, op.Cast(features.tokens, to=FLOAT))
    similar = op.Min(op.MatMul(unit, op.Transpose(unit, perm=[0, 2, 1])), SAME)
    function = local_function(ROUNDS, "MatchingRound", _round, facts.dialect.OPSET)
    wanted = as_vector(counts.diverse)
    left = op.Constant(value_ints=wanted) if isinstance(wanted, list) else wanted
    for _ in range(rounds(facts, kept)):
        rest = op.call(function, similar, rest, left)
    chosen = op.Concat(salient, rest, axis=1)
    output_tokens(graph, facts, kept, features, ascending(graph, chosen, op.Shape(chosen, start=1, end=2)))
    return PlanGraphs(kept, graph)


def rounds(facts: PlanFacts, kept: Budget) -> int:
    """Return the rounds that drop all but the kept tokens, of any number of tokens up to the most.

    Further rounds drop nothing.
    """
    most = facts.most_at_once(kept)
    sizes = [most] if isinstance(facts.tokens, int) else range(1, most + 1)
    return max(_rounds_of(kept.resolve(tokens), tokens) for tokens in sizes)


def _rounds_of(counts: Counts, tokens: int) -> int:
    left, done = tokens - counts.reserve, 0
    # Rounds drop AT_ONCE until fewer than twice as many are left; the last rounds are counted one by one.
    whole = max(0, min(left - counts.diverse, left - 2 * AT_ONCE) // AT_ONCE)
    left, done = left - AT_ONCE * whole, whole
    while left > counts.diverse:
        left, done = left - min(AT_ONCE, left - counts.diverse, -(-left // 2)), done + 1
    return done


def _round(op: Any, similar: ir.Value, rest: ir.Value, left: ir.Value) -> list[ir.Value]:
    """Write one round: of every second token of `rest` [G,R], drop those most like one of the others.

    `similar` [G,N,N] are the cosines, and `left` [1] is the number of tokens that stay in the end. Returns the tokens
    that are left, in their order.
    """
    size = op.Shape(rest, start=1, end=2)
    first = op.Slice(rest, [0], size, [1], [2])
    second = op.Slice(rest, [1], size, [1], [2])
    number = op.Shape(first, start=1, end=2)
    nowhere = op.Expand(0, op.Slice(op.Shape(similar), [0], [2]))
    among = op.Cast(op.ScatterElements(nowhere, second, op.Expand(1, op.Shape(second)), axis=1), to=BOOL)
    rows = gathered(op, similar, first)
    nearest = op.ReduceMax(op.Where(op.Unsqueeze(among, [1]), rows, float("-inf")), [-1], keepdims=0)
    _, order = op.TopK(nearest, number, axis=-1, largest=1, sorted=1, _outputs=2)
    dropped = op.Min([AT_ONCE], op.Sub(size, left), number)
    stay = op.Mul(op.Cast(op.Slice(order, dropped, number, [1]), to=FLOAT), 2.0)
    odd = op.Add(op.Mul(op.Cast(op.Range(0, op.Squeeze(op.Sub(size, number)), 1), to=FLOAT), 2.0), 1.0)
    odd = op.Expand(op.Unsqueeze(odd, [0]), op.Shape(second))
    place, _ = op.TopK(op.Concat(stay, odd, axis=1), op.Sub(size, dropped), axis=-1, largest=0, sorted=1, _outputs=2)
    return [op.GatherElements(rest, op.Cast(place, to=INT64), axis=1)]
