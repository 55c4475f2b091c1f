"""Baselines that never look at the image: `uniform`, evenly spaced tokens, and `random`, a fixed random draw.

docs/methods.md. Both keep the same places of all images of as many tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import onnx_ir as ir

from sinkprune.contract.budgets import Budget
from sinkprune.export.graph import Graph
from sinkprune.export.pruning.equal_mean import kept_before, tokens_into_llm
from sinkprune.export.pruning.plan import PlanFacts, PlanGraphs
from sinkprune.export.pruning.sanitizer import ascending, give_tokens, largest, new_sanitizer
from sinkprune.export.pruning.shares import sanitizer_counts, vector

SEED = 0


def build_uniform(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """The middle token of each of k equal parts of the image, in raster order."""

    def middles(graph: Graph, tokens: ir.Value, count: ir.Value) -> ir.Value:
        op = graph.op
        part = op.Unsqueeze(op.Range(0, op.Squeeze(count), 1), [0])
        return op.Div(op.Mul(op.Add(op.Mul(part, 2), 1), tokens), op.Mul(count, 2))

    return _build(facts, _kept(facts, budget), middles)


def build_random(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """The k tokens of largest score, scores drawn from `SEED`: what a small budget keeps, a large one keeps too."""
    kept = _kept(facts, budget)
    facts.check_ranked(facts.most_counts(kept).kept)
    draw = Random(SEED)
    scores = [draw.random() for _ in range(facts.most_at_once(kept))]
    ranks = [0.0] * len(scores)
    # Ranks, because scores may tie when they are rounded to fp32.
    for rank, token in enumerate(sorted(range(len(scores)), key=scores.__getitem__)):
        ranks[token] = float(rank)

    def drawn(graph: Graph, tokens: ir.Value, count: ir.Value) -> ir.Value:
        op = graph.op
        own = op.Slice(op.Constant(value_floats=ranks), [0], tokens, [0])
        return ascending(graph, largest(graph, op.Unsqueeze(own, [0]), count), count)

    return _build(facts, kept, drawn)


METHODS = {"uniform": build_uniform, "random": build_random}


def _kept(facts: PlanFacts, budget: Budget) -> Budget:
    return kept_before(facts, budget, diverse=tokens_into_llm(facts, budget))


def _build(facts: PlanFacts, kept: Budget, places: Callable[[Graph, ir.Value, ir.Value], ir.Value]) -> PlanGraphs:
    """The tokens at `places` [1,k] of N and k, each [1] int64."""
    graph, features = new_sanitizer(facts, kept)
    count = sanitizer_counts(graph.op, facts, kept, features.norms).diverse
    tokens = graph.op.Shape(features.norms, start=1, end=2)
    fixed = graph.op.Constant(value_ints=vector(count)) if isinstance(count, int) else count
    give_tokens(graph, facts, kept, features, places(graph, tokens, fixed))
    return PlanGraphs(kept, graph)
