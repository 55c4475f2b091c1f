"""SinkPruner: the visual sanitizer before the LLM and the text-guided pruner at three decoder layers.

method.md sections 1 and 2 hold the rules; each step below names its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from sinkprune.contract.budgets import Budget, Counts, prune_layers
from sinkprune.contract.errors import BudgetError
from sinkprune.export.graph import Graph
from sinkprune.export.pruning.functions import diversity_select, top_rho
from sinkprune.export.pruning.plan import PlanFacts, PlanGraphs, UpTo
from sinkprune.export.pruning.sanitizer import ascending, gather_rows, give_rows, joined, largest, new_sanitizer
from sinkprune.export.pruning.select import build_selects, every_text_row
from sinkprune.export.pruning.shares import SanitizerCounts, fixed, shares_of, vector


def build(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """The plan of `budget`: a sanitizer (unless the budget goes without) and a select after each prune layer."""
    return build_after(facts, budget, _usual_cuts(facts, budget.stages))


def build_after(facts: PlanFacts, budget: Budget, cuts: Sequence[int]) -> PlanGraphs:
    """The plan of `budget` whose stages follow the layers `cuts` (0-based, ascending)."""
    if isinstance(facts.tokens, UpTo):
        return _build_shares(facts, budget, facts.tokens, cuts)
    return _build_counts(facts, budget, budget.resolve(facts.tokens), cuts)


def build_counts(facts: PlanFacts, budget: Budget, counts: Counts) -> PlanGraphs:
    """The plan that keeps `counts`, with the options of `budget`."""
    return _build_counts(facts, budget, counts, _usual_cuts(facts, counts.stages))


METHODS = {"sinkpruner": build}


def _build_counts(facts: PlanFacts, budget: Budget, counts: Counts, cuts: Sequence[int]) -> PlanGraphs:
    selects = build_selects(facts, budget, cuts, counts.stages, every_text_row)
    return PlanGraphs(counts, _sanitizer(facts, budget, fixed(counts, budget.diversity_group_size)), selects)


def _build_shares(facts: PlanFacts, budget: Budget, tokens: UpTo, cuts: Sequence[int]) -> PlanGraphs:
    """The plan that takes the shares of `budget` of as many tokens as an image has."""
    if budget.positions == "compact" and facts.language_model.rope_sections:
        raise BudgetError(
            "option 'compact' renumbers rows in line, and the positions of this family have several axes. "
            "Leave the option out."
        )
    in_group = tokens.most if budget.frames == "apart" else tokens.in_all
    if budget.sanitizer:
        most = budget.resolve(in_group)
        facts.check_ranked(most.reserve + (most.diverse if budget.order == "raster" else 0))
    counts = shares_of(budget, in_group)
    selects = build_selects(facts, budget, cuts, budget.stages, every_text_row)
    return PlanGraphs(None, _sanitizer(facts, budget, counts), selects)


def _usual_cuts(facts: PlanFacts, stages: Sequence[object]) -> tuple[int, ...]:
    return prune_layers(facts.language_model.num_layers) if stages else ()


def _sanitizer(facts: PlanFacts, budget: Budget, counts: SanitizerCounts) -> Graph | None:
    """`sanitizer` of the graph contract (method.md section 1); None where the budget goes without."""
    if not budget.sanitizer:
        return None
    graph, features = new_sanitizer(facts)
    as_one = facts.joined and budget.frames == "together"
    tokens, norms, salience, rows = joined(graph, facts, features) if as_one else features
    op = graph.op
    reserve, diverse = counts.of(op, norms)

    # 1, 2: outliers and their mean
    sink = outlier = None
    if counts.outliers:
        sink, outlier = op.call(top_rho(facts.dialect.OPSET), norms, rows, per_mille=budget.outlier_per_mille)
        salience = op.Where(outlier, float("-inf"), salience)

    # 3: RES, the most salient of LOW
    reserved = largest(graph, salience, reserve)
    index = ascending(graph, reserved, reserve)

    # 4: DIV, the tokens of LOW least like what is kept
    if counts.rounds:
        ones = op.Expand(1, op.Shape(norms))
        free = op.ScatterElements(ones, reserved, op.Expand(0, op.Shape(reserved)), axis=1)
        candidate = op.Cast(free, to=ir.DataType.BOOL)
        if counts.outliers:
            candidate = op.And(candidate, op.Not(outlier))
        function = diversity_select(counts.rounds, opset=facts.dialect.OPSET)
        chosen = op.call(function, tokens, candidate, reserved, vector(diverse), batch=budget.diversity_group_size)
        index = op.Concat(index, chosen, axis=1)

    # 5: Z = [sink ; RES ; DIV]
    if budget.order == "raster":
        index = ascending(graph, index, op.Shape(index, start=1, end=2))
    kept = gather_rows(graph, rows, index)
    if counts.sink:
        first = largest(graph, norms, 1)
        kept = op.Concat(sink, kept, axis=1)
        index = op.Concat(first, index, axis=1)
    give_rows(graph, facts, kept, index, counts.kept, 1 if as_one else "G")
    return graph
