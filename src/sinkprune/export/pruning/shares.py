"""The number of tokens that a graph keeps: counts known at export, or a budget's shares of the input's tokens.

Graphs compute here what `Budget.resolve` and `sinkprune.contract.schedule` compute for the host, in the same integers
(method.md sections 1 to 3). `op` are the operators of a graph or function under construction.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import onnx_ir as ir

from sinkprune.contract.budgets import Budget, Share
from sinkprune.export.graph import Dim
from sinkprune.export.pruning.plan import PlanFacts

TokenCount = int | ir.Value
"""A number of tokens: known at export, or [1] int64 in the graph."""


def as_vector(count: TokenCount) -> list[int] | ir.Value:
    """Return `count` as an operand of shape [1]."""
    return [count] if isinstance(count, int) else count


class SanitizerCounts(NamedTuple):
    """The tokens that a sanitizer keeps of each group."""

    reserve: TokenCount
    """k_res."""
    diverse: TokenCount
    """k_div."""
    others: TokenCount
    """The number of tokens that are neither outliers nor among the k_res."""


def sanitizer_counts(op: Any, facts: PlanFacts, kept: Budget, norms: ir.Value) -> SanitizerCounts:
    """Return the counts of the shares `kept`, of the tokens of `norms` [G,N]."""
    if isinstance(facts.tokens, int):
        counts = kept.resolve(facts.tokens)
        return SanitizerCounts(counts.reserve, counts.diverse, facts.tokens - counts.outliers - counts.reserve)
    tokens = op.Shape(norms, start=1, end=2)
    low = op.Sub(tokens, outlier_count(op, tokens, [kept.outlier_per_mille])) if kept.remove_outliers else tokens
    reserve = op.Min(share_of(op, tokens, kept.reserve), low)
    others = op.Sub(low, reserve)
    return SanitizerCounts(reserve, op.Min(share_of(op, tokens, kept.diverse), others), others)


def rows_kept(facts: PlanFacts, kept: Budget) -> Dim:
    """Return n0, the rows that a sanitizer of the shares `kept` keeps of each group, for the shape of a tensor."""
    return kept.resolve(facts.tokens).kept if isinstance(facts.tokens, int) else "n0"


def outlier_count(op: Any, tokens: ir.Value, per_mille: ir.Value | list[int]) -> ir.Value:
    """Return |H| [1] int64 of a group of `tokens` [1] int64: a share rounded up, at least 1."""
    return op.Max(op.Div(op.Add(op.Mul(tokens, per_mille), [999]), [1000]), [1])


def of_all_groups(kept: int | Share, facts: PlanFacts) -> int | Share:
    """Return the tokens of all groups of an image that survive a stage; a count `kept` is that of one group."""
    # The graph counts the groups, so a count for each group is a share of all tokens.
    return Share(kept, facts.nominal_tokens) if isinstance(kept, int) and facts.groups > 1 else kept


def share_of(op: Any, tokens: ir.Value, part: Share) -> ir.Value:
    """Return `part` of `tokens` [1] int64, rounded as in `Share.of`."""
    if part.numerator == 0:
        return op.Mul(tokens, [0])
    return op.Max(op.Div(op.Mul(tokens, [part.numerator]), [part.denominator]), [1])
