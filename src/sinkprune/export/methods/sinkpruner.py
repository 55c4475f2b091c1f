"""SinkPruner, its other forms, and the paper's ablations.

method.md sections 1 and 2 have the rules. Each step below names its rule.

RES of `sinkpruner-text` takes the tokens of largest salience and relevance together. The relevance of a token is the
mean of its cosines with the words of the question, both as the LLM receives them. Both scores are scaled to 0 to 1
over the tokens that are no outliers, and have equal weight. All other steps are SinkPruner's.

An ablation is SinkPruner without one part, at the same mean visual tokens per layer (docs/methods.md). The most
salient tokens take the places of the missing part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import onnx_ir as ir

from sinkprune.contract.budgets import Budget, one_stage, prune_layers
from sinkprune.export.graph import Graph
from sinkprune.export.pruning.equal_mean import scaled_stages, shares_of, without_stages
from sinkprune.export.pruning.functions import centred, gathered, top_rho, unit_rows
from sinkprune.export.pruning.plan import PlanFacts, PlanGraphs, sanitizer_counts
from sinkprune.export.pruning.sanitizer import (
    TowerValues,
    ascending,
    largest,
    least_similar,
    mean_cosines,
    new_sanitizer,
    output_rows,
    rows_in_llm,
)
from sinkprune.export.pruning.select import build_selects, every_text_row

Score = Callable[[PlanFacts, Graph, TowerValues, ir.Value | None], ir.Value]
"""Writes the score [G,N] by which RES takes tokens, in place of the salience. The last argument is the mask of
outliers, if any."""


def build(facts: PlanFacts, budget: Budget, score: Score | None = None, centring: bool = False) -> PlanGraphs:
    """Return the plan of `budget`: a sanitizer, unless it has `no-sanitizer`, and one stage (`one_stage`).

    With `centring`, DIV is chosen by the rule of Cen-Prune: tokens are compared without their mean, and distinctive
    ones are preferred.
    """
    layers = facts.language_model.num_layers
    kept, cuts = one_stage(budget, facts.nominal_tokens, layers), prune_layers(layers)[:1] if budget.stages else ()
    return build_after(facts, kept, cuts, score, centring)


def build_paper(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """Return the plan of `budget` by the paper's letter: 16 diverse tokens a round, and three stages."""
    cuts = prune_layers(facts.language_model.num_layers) if budget.stages else ()
    return build_after(facts, replace(budget, diversity_rounds=1), cuts)


def build_after(
    facts: PlanFacts, budget: Budget, cuts: Sequence[int], score: Score | None = None, centring: bool = False
) -> PlanGraphs:
    """Return the plan of `budget` whose stages follow the layers `cuts` (0-based, ascending)."""
    sanitizer = _sanitizer(facts, budget, score, centring) if budget.sanitizer else None
    return PlanGraphs(budget, sanitizer, build_selects(facts, budget, cuts, every_text_row))


def _sanitizer(facts: PlanFacts, budget: Budget, score: Score | None, centring: bool) -> Graph:
    """Return `sanitizer` of the graph contract (method.md section 1)."""
    most = facts.most_counts(budget)
    facts.check_ranked(most.reserve + (most.diverse if budget.order == "raster" else 0))
    graph, features = new_sanitizer(facts, budget)
    tokens, norms, _, rows = features
    op = graph.op
    reserve, diverse, _ = sanitizer_counts(op, facts, budget, norms)

    # 1, 2: outliers and their mean
    sink = outlier = None
    if most.outliers:
        sink, outlier = op.call(top_rho(facts.dialect.OPSET), norms, rows, per_mille=budget.outlier_per_mille)

    # 3: RES, the most salient of LOW, or those of best score
    scores = score(facts, graph, features, outlier) if score else features.salience
    reserved = largest(graph, scores if outlier is None else op.Where(outlier, float("-inf"), scores), reserve)
    index = ascending(graph, reserved, reserve)

    # 4: DIV, the tokens of LOW least like what is kept
    if most.diverse:
        ones = op.Expand(1, op.Shape(norms))
        free = op.ScatterElements(ones, reserved, op.Expand(0, op.Shape(reserved)), axis=1)
        candidate = op.Cast(free, to=ir.DataType.BOOL)
        if most.outliers:
            candidate = op.And(candidate, op.Not(outlier))
        compared, preference = centred(op, tokens) if centring else (tokens, None)
        chosen = least_similar(graph, facts, budget, compared, candidate, reserved, diverse, most.diverse, preference)
        index = op.Concat(index, chosen, axis=1)

    # 5: Z = [sink ; RES ; DIV]
    if budget.order == "raster":
        index = ascending(graph, index, op.Shape(index, start=1, end=2))
    kept = gathered(op, rows, index)
    if most.sink:
        first = largest(graph, norms, 1)
        kept = op.Concat(sink, kept, axis=1)
        index = op.Concat(first, index, axis=1)
    output_rows(graph, facts, budget, kept, index)
    return graph


# Far below any spread of scores; where all are equal, 0 is divided by it.
_LEAST_SPREAD = 1e-30


def by_salience_and_relevance(
    facts: PlanFacts, graph: Graph, features: TowerValues, outlier: ir.Value | None
) -> ir.Value:
    """Return the scaled salience plus the scaled relevance, [G,N]."""
    relevance = mean_cosines(graph.op, *(unit_rows(graph.op, rows) for rows in rows_in_llm(facts, graph, features)))
    return graph.op.Add(_scaled(graph, features.salience, outlier), _scaled(graph, relevance, outlier))


build_centred = partial(build, centring=True)
build_with_text = partial(build, score=by_salience_and_relevance)


def _scaled(graph: Graph, values: ir.Value, outlier: ir.Value | None) -> ir.Value:
    """Return `values` [G,N] scaled so that they go from 0 to 1 over each group's tokens that are no outliers."""
    op = graph.op
    low, high = (values if outlier is None else op.Where(outlier, float(f"{sign}inf"), values) for sign in ("", "-"))
    least, most = op.ReduceMin(low, [-1], keepdims=1), op.ReduceMax(high, [-1], keepdims=1)
    return op.Div(op.Sub(values, least), op.Max(op.Sub(most, least), _LEAST_SPREAD))


def no_sanitizer(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """Pass every token to the LLM; the stage keeps as many as meet the mean."""
    cuts = prune_layers(facts.language_model.num_layers)[:1]
    return build_after(facts, scaled_stages(facts, budget, cuts, [facts.nominal_tokens]), cuts)


def no_text_pruner(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """Keep the mean in the sanitizer, salient and diverse tokens in the budget's proportion, without a stage."""
    return build(facts, without_stages(facts, budget))


def no_diversity(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """Keep salient tokens in the places of diverse ones, duplicates included."""
    counts = budget.resolve(facts.nominal_tokens)
    return build(facts, shares_of(facts, budget, replace(counts, reserve=counts.reserve + counts.diverse, diverse=0)))


def no_outlier_removal(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """Treat high-norm tokens like all others; a salient token takes the sink's place."""
    return _without_sink(facts, budget, replace(budget, remove_outliers=False))


def no_aggregation(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """Drop high-norm tokens without averaging them; a salient token takes the sink's place."""
    return _without_sink(facts, budget, replace(budget, aggregate=False))


def _without_sink(facts: PlanFacts, budget: Budget, without: Budget) -> PlanGraphs:
    """Return the plan of `without` that keeps as many tokens as `budget`, or all if there are fewer."""
    n = facts.nominal_tokens
    kept, counts = budget.resolve(n).kept, without.resolve(n)
    reserve = min(kept, n - counts.outliers) - counts.diverse
    return build(facts, shares_of(facts, without, replace(counts, reserve=reserve)))
