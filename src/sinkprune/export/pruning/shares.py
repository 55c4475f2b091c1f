"""How many tokens a graph keeps: counts known when it is written, or a budget's shares of the tokens it is given.

What `Budget.resolve` and `sinkprune.contract.schedule` compute for the host stands here for graphs, and nowhere else,
in the same integers (method.md sections 1 to 3). `op` are the operators of a graph or function under construction.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import onnx_ir as ir

from sinkprune.contract.budgets import Budget, Share
from sinkprune.export.graph import Dim, Graph
from sinkprune.export.pruning.plan import PlanFacts

Count = int | ir.Value
"""A number of tokens: known when the graph is written, or [1] int64 within it."""


def vector(count: Count) -> list[int] | ir.Value:
    """`count` as operators take it, of shape [1]."""
    return [count] if isinstance(count, int) else count


class SanitizerCounts(NamedTuple):
    """What a sanitizer keeps of each group."""

    reserve: Count
    """k_res."""
    diverse: Count
    """k_div."""
    others: Count
    """How many tokens are neither outliers nor among the k_res."""


def sanitizer_counts(op: Any, facts: PlanFacts, kept: Budget, norms: ir.Value) -> SanitizerCounts:
    """What the shares `kept` are of the tokens of `norms` [G,N]."""
    if isinstance(facts.tokens, int):
        counts = kept.resolve(facts.tokens)
        return SanitizerCounts(counts.reserve, counts.diverse, facts.tokens - counts.outliers - counts.reserve)
    tokens = op.Shape(norms, start=1, end=2)
    low = op.Sub(tokens, outliers(op, tokens, [kept.outlier_per_mille])) if kept.remove_outliers else tokens
    reserve = op.Min(_share(op, tokens, kept.reserve), low)
    others = op.Sub(low, reserve)
    return SanitizerCounts(reserve, op.Min(_share(op, tokens, kept.diverse), others), others)


def rows_kept(facts: PlanFacts, kept: Budget) -> Dim:
    """n0, the rows that a sanitizer of the shares `kept` gives of each group, as the shape of a tensor says it."""
    return kept.resolve(facts.tokens).kept if isinstance(facts.tokens, int) else "n0"


def outliers(op: Any, tokens: ir.Value, per_mille: ir.Value | list[int]) -> ir.Value:
    """|H| [1] int64 of a group of `tokens` [1] int64: a share rounded up, at least 1."""
    return op.Max(op.Div(op.Add(op.Mul(tokens, per_mille), [999]), [1000]), [1])


def of_all_groups(kept: int | Share, facts: PlanFacts) -> int | Share:
    """What survives a stage of all groups of an image; a count `kept` is that of one."""
    # Groups are counted in the graph: so many of each are a share of what all of them had.
    return Share(kept, facts.nominal_tokens) if isinstance(kept, int) and facts.groups > 1 else kept


def surviving(graph: Graph, rows: ir.Value, kept: int | Share, tokens: Dim) -> ir.Value:
    """[1] int64: how many of an image's visual `rows` [V] survive a stage that keeps `kept`.

    A share is of all G*N tokens the image had, told by the shape of the input `norms` [G,`tokens`], declared here.
    """
    op = graph.op
    if isinstance(kept, Share):
        norms = graph.input("norms", ["G", tokens], ir.DataType.FLOAT)
        most = _share(op, op.Mul(op.Shape(norms, start=0, end=1), op.Shape(norms, start=1, end=2)), kept)
    # K_s >= V: every visual row survives
    return op.Min(op.Shape(rows), most if isinstance(kept, Share) else [kept])


def _share(op: Any, tokens: ir.Value, part: Share) -> ir.Value:
    """`part` of `tokens` [1] int64, as `Share.of` rounds it."""
    if part.numerator == 0:
        return op.Mul(tokens, [0])
    return op.Max(op.Div(op.Mul(tokens, [part.numerator]), [part.denominator]), [1])
