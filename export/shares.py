"""How many tokens a graph keeps: counts known when it is written, or a budget's shares of the tokens it is given.

Within a graph `shares_of` does what `Budget.resolve` does, in the same integers (method.md sections 1 and 3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import onnx_ir as ir

from sinkprune.contract.budgets import Budget, Counts, Share
from sinkprune.export.graph import Dim
from sinkprune.export.sanitizer import Count


class SanitizerCounts(NamedTuple):
    """What a sanitizer keeps."""

    outliers: bool
    """Whether high-norm tokens are taken out."""
    sink: bool
    """Whether their mean takes the first place."""
    of: Callable[[Any, ir.Value], tuple[Count, Count]]
    """k_res and k_div in a graph with operators `op`, for an image of `norms` [G,N]."""
    rounds: int
    """Rounds of DIV that are enough for every image; 0 where there is no DIV."""
    kept: Dim
    """n0."""


def fixed(counts: Counts, batch: int) -> SanitizerCounts:
    """The same counts for every image."""

    def of(op: Any, norms: ir.Value) -> tuple[Count, Count]:
        return counts.reserve, counts.diverse

    return SanitizerCounts(bool(counts.outliers), bool(counts.sink), of, -(-counts.diverse // batch), counts.kept)


def shares_of(budget: Budget, most: int) -> SanitizerCounts:
    """The shares of `budget`, for images of at most `most` visual tokens."""

    def of(op: Any, norms: ir.Value) -> tuple[Count, Count]:
        tokens = op.Shape(norms, start=1, end=2)
        low = tokens
        if budget.remove_outliers:
            outliers = op.Div(op.Add(op.Mul(tokens, [budget.outlier_per_mille]), [999]), [1000])
            low = op.Sub(tokens, op.Max(outliers, [1]))
        reserve = op.Min(share(op, tokens, budget.reserve), low)
        return reserve, op.Min(share(op, tokens, budget.diverse), op.Sub(low, reserve))

    counts = budget.resolve(most)
    return fixed(counts, budget.diversity_group_size)._replace(of=of, kept="n0")


def share(op: Any, tokens: ir.Value, part: Share) -> ir.Value:
    """`part` of `tokens` [1] int64, as `Share.of` rounds it."""
    if part.numerator == 0:
        return op.Mul(tokens, [0])
    return op.Max(op.Div(op.Mul(tokens, [part.numerator]), [part.denominator]), [1])
