"""VScan: two scans of the vision tower's salience, merging, and one cut in the middle of the decoder ("VScan:
Rethinking Visual Token Reduction for Efficient Large Vision-Language Models").

Of the k tokens that enter the LLM, half (rounded down) are local: the most salient of each window of the picture, as
many of each window. The others are global: the most salient of the rest. Every other token is averaged with the kept
token that it is most similar to. After layer 16 (0-based, of 32) about a third of the k tokens stay, by the attention
of the last row.

The paper's local scan reads a shallow layer of the tower. Our towers output the final salience only, which both scans
read. docs/method-choices.md lists the other differences.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import isqrt

import onnx_ir as ir

from sinkprune.contract.budgets import Budget, Counts, round_half_up, scaled_layers
from sinkprune.export.graph import FLOAT, Graph
from sinkprune.export.methods.in_llm import last_row
from sinkprune.export.methods.visionzip import sums_of_similar
from sinkprune.export.pruning.equal_mean import budget_mean, shares_of
from sinkprune.export.pruning.functions import gathered
from sinkprune.export.pruning.plan import (
    PlanFacts,
    PlanGraphs,
    SanitizerCounts,
    TokenCount,
    as_vector,
    sanitizer_counts,
)
from sinkprune.export.pruning.sanitizer import (
    TowerValues,
    in_every_group,
    largest,
    mask_of,
    new_sanitizer,
    output_rows,
    places,
    smallest,
)
from sinkprune.export.pruning.select import build_selects

WINDOWS = 16
"""The windows of a picture: 6x6 of LLaVA-1.5's 24x24 tokens each. Fewer, if fewer tokens are local."""


def build(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """Return the plan of both stages, which meet the budget's mean together."""
    facts.check_grid(budget)
    cuts = scaled_layers((16,), facts.language_model.num_layers)
    before, after = third_after(facts, budget, cuts[0])
    options = replace(budget, sanitizer=True, remove_outliers=False)
    kept = shares_of(facts, options, Counts(0, 0, before - before // 2, before // 2, stages=(after,)))
    return PlanGraphs(kept, _sanitizer(facts, kept), build_selects(facts, kept, cuts, last_row))


def third_after(facts: PlanFacts, budget: Budget, cut: int) -> tuple[int, int]:
    """Return the nominal tokens of a group up to the layer `cut` (0-based), and those after it: about a third.

    The ratio gives the first count. The second makes up for its rounding. Together they meet the mean.
    """
    layers, until = facts.language_model.num_layers, cut + 1
    total = budget_mean(facts, budget) * layers
    before = min(facts.nominal_tokens, max(1, round_half_up(total / (until + Fraction(layers - until, 3)))))
    return before, min(before, max(1, round_half_up((total - before * until) / (layers - until))))


def _sanitizer(facts: PlanFacts, kept: Budget) -> Graph:
    """Return the sanitizer of the first stage: kept tokens in raster order, with the others merged into them."""
    most = facts.most_counts(kept)
    facts.check_ranked(most.kept)
    graph, features = new_sanitizer(facts, kept)
    op = graph.op
    counts = sanitizer_counts(op, facts, kept, features.norms)
    count = _sum(graph, counts.reserve, counts.diverse)
    chosen = _scanned(graph, features, facts, counts, bool(most.diverse))
    place = op.Cast(places(graph, features.norms), to=FLOAT)
    index = smallest(graph, op.Where(chosen, place, float("inf")), count)
    index = in_every_group(graph, features, index)

    sums, sizes = sums_of_similar(graph, features, index, op.Not(chosen))
    own = gathered(op, op.Cast(features.rows, to=FLOAT), index)
    merged = op.Div(op.Add(own, sums), op.Add(sizes, 1.0))
    output_rows(graph, facts, kept, op.CastLike(merged, features.tokens), index)
    return graph


def _scanned(
    graph: Graph, features: TowerValues, facts: PlanFacts, counts: SanitizerCounts, has_local: bool
) -> ir.Value:
    """Return the mask [G,N] of the tokens that either scan keeps."""
    op = graph.op
    if not has_local:
        return mask_of(graph, features, largest(graph, features.salience, counts.reserve))
    numbers, window, share, rest_of_local = _windows(graph, features, facts, counts.diverse)
    member = op.Equal(op.Unsqueeze(window, [0]), op.Unsqueeze(numbers, [1]))
    ranked = op.Where(op.Unsqueeze(member, [0]), op.Unsqueeze(features.salience, [1]), float("-inf"))
    best = largest(graph, ranked, share)
    marks = op.ScatterElements(op.Expand(0.0, op.Shape(ranked)), best, op.Expand(1.0, op.Shape(best)), axis=2)
    local = op.Cast(op.ReduceMax(marks, [1], keepdims=0), to=ir.DataType.BOOL)
    # What does not divide by the windows is left to the global scan.
    others = _sum(graph, counts.reserve, rest_of_local)
    rest = largest(graph, op.Where(local, float("-inf"), features.salience), others)
    return op.Or(local, mask_of(graph, features, rest))


def _windows(
    graph: Graph, features: TowerValues, facts: PlanFacts, local: TokenCount
) -> tuple[ir.Value, ir.Value, TokenCount, TokenCount]:
    """Return the windows for `local` tokens: squares of a square grid, else runs of tokens in raster order.

    These are their numbers [W] int64, the window of each token [N] int64, the local tokens of each window, and those
    that are too few for one more of each. No window has fewer tokens than its share, because at most half of the
    tokens are local.
    """
    op = graph.op
    tokens = op.Shape(features.norms, start=1, end=2)
    place = places(graph, features.norms)
    if not isinstance(local, int):
        windows = op.Max(op.Min(local, [WINDOWS]), [1])
        share = op.Div(local, windows)
        numbers = op.Range(0, op.Squeeze(windows), 1)
        return numbers, op.Div(op.Mul(place, windows), tokens), share, op.Sub(local, op.Mul(share, windows))

    side = isqrt(facts.most_in_group)
    if side**2 == facts.most_in_group:
        across = isqrt(min(local, WINDOWS))
        row = op.Div(place, side)
        column = op.Sub(place, op.Mul(row, side))
        line = op.Div(op.Mul(row, across), side)
        of_token = op.Add(op.Mul(line, across), op.Div(op.Mul(column, across), side))
        number = across**2
    else:
        number = min(local, WINDOWS)
        of_token = op.Div(op.Mul(place, number), tokens)
    return op.Range(0, number, 1), of_token, local // number, local % number


def _sum(graph: Graph, first: TokenCount, second: TokenCount) -> TokenCount:
    if isinstance(first, int) and isinstance(second, int):
        return first + second
    return graph.op.Add(as_vector(first), as_vector(second))
