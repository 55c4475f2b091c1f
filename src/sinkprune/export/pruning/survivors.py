"""The visual rows that survive a text-guided stage: those of largest score, of one image or of each image."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import onnx_ir as ir

from sinkprune.contract.budgets import Share
from sinkprune.contract.plans import MAX_TOP_K
from sinkprune.export.graph import Dim, Graph
from sinkprune.export.pruning.shares import share_of

_FLOAT = ir.DataType.FLOAT
_INT64 = ir.DataType.INT64


class Survivors(NamedTuple):
    """The survivors of a stage's V visual rows."""

    alive: ir.Value
    """[V] int64: 1 for a row that survives, else 0."""
    left: ir.Value
    """[1] int64: the number of survivors, which depends on shapes only."""


SelectionRule = Callable[[Graph, ir.Value], Survivors]
"""Chooses by the rows' scores [V] fp32, and declares the inputs that it needs. Ties go to the earlier row."""


def best_of_one_image(kept: int | Share, tokens: Dim = "N") -> SelectionRule:
    """Return a choice of the `kept` best of one image. A share is of all G*N tokens of `norms` [G,`tokens`]."""

    def choose(graph: Graph, scores: ir.Value) -> Survivors:
        op = graph.op
        most: ir.Value | list[int]
        if isinstance(kept, Share):
            norms = graph.input("norms", ["G", tokens], _FLOAT)
            most = share_of(op, op.Mul(op.Shape(norms, start=0, end=1), op.Shape(norms, start=1, end=2)), kept)
        else:
            most = [kept]
        # If K_s >= V, every visual row survives.
        count = op.Min(op.Shape(scores), most)
        _, index = op.TopK(scores, count, axis=-1, largest=1, sorted=1, _outputs=2)
        nobody = op.Expand(0, op.Shape(scores))
        return Survivors(op.ScatterElements(nobody, index, op.Expand(1, op.Shape(index)), axis=0), count)

    return choose


def best_of_each_image(images: int) -> SelectionRule:
    """Return a choice of the best of each of up to `images` images.

    The inputs `quota` [V2] and `visual_group` [V] hold image numbers; an image keeps as many rows as `quota` has of
    it. The number of survivors is the length of an input, because no compiler takes a shape that depends on values.
    Images are ranked in a table of `images` x V; to compare rows pairwise would take V x V.
    """

    def choose(graph: Graph, scores: ir.Value) -> Survivors:
        op = graph.op
        group, quota = graph.input("visual_group", ["V"], _INT64), graph.input("quota", ["V2"], _INT64)
        every = list(range(images))

        def whose(numbers: ir.Value) -> ir.Value:
            return op.Equal(op.Unsqueeze(numbers, [0]), op.Unsqueeze(every, [1]))

        own = whose(group)
        # No image keeps more than TopK returns: the export rejects such a plan.
        count = op.Min(op.Shape(quota), op.Shape(scores), [MAX_TOP_K])
        ranked = op.Where(own, op.Unsqueeze(scores, [0]), float("-inf"))
        _, index = op.TopK(ranked, count, axis=-1, largest=1, sorted=1, _outputs=2)
        places = op.ReduceSum(op.Cast(whose(quota), to=_FLOAT), [1], keepdims=1)
        rank = op.Cast(op.Range(0, op.Squeeze(count), 1), to=_FLOAT)
        taken = op.Cast(op.Less(op.Unsqueeze(rank, [0]), places), to=_FLOAT)
        alive = op.ScatterElements(op.Expand(0.0, op.Shape(own)), index, taken, axis=1)
        return Survivors(op.Cast(op.ReduceSum(alive, [0], keepdims=0), to=_INT64), op.Shape(quota))

    return choose
