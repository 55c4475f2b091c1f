"""Which visual rows survive a text-guided stage: those of largest score, of one image or of each of several."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import onnx_ir as ir

from sinkprune.contract.budgets import Share
from sinkprune.contract.plans import MAX_TOP_K
from sinkprune.export.graph import Dim, Graph
from sinkprune.export.pruning.shares import surviving

_FLOAT = ir.DataType.FLOAT
_INT64 = ir.DataType.INT64


class Survivors(NamedTuple):
    """What a stage leaves of its V visual rows."""

    alive: ir.Value
    """[V] int64: 1 where a row survives, 0 where it does not."""
    left: ir.Value
    """[1] int64: how many survive, told by shapes alone."""


Choice = Callable[[Graph, ir.Value], Survivors]
"""Chooses by the rows' scores [V] fp32, and declares the inputs it needs for that. Ties go to the earlier row."""


def best(kept: int | Share, tokens: Dim = "N") -> Choice:
    """The `kept` best of one image. A share is of the tokens the image had, told by its `norms` [G,`tokens`]."""

    def choose(graph: Graph, scores: ir.Value) -> Survivors:
        op = graph.op
        count = surviving(graph, scores, kept, tokens)
        _, index = op.TopK(scores, count, axis=-1, largest=1, sorted=1, _outputs=2)
        nobody = op.Expand(0, op.Shape(scores))
        return Survivors(op.ScatterElements(nobody, index, op.Expand(1, op.Shape(index)), axis=0), count)

    return choose


def best_of_each_image(images: int) -> Choice:
    """The best of each of up to `images` images, as many as `quota` [V2] has rows of it.

    It and `visual_group` [V] hold image numbers. How many survive depends on every image's own tokens. It comes as
    the length of an input, because a shape that depends on values would stop every compiler. Images are ranked side
    by side, in a table of `images` x V: row against row would take V x V.
    """

    def choose(graph: Graph, scores: ir.Value) -> Survivors:
        op = graph.op
        group, quota = graph.input("visual_group", ["V"], _INT64), graph.input("quota", ["V2"], _INT64)
        every = list(range(images))

        def whose(numbers: ir.Value) -> ir.Value:
            return op.Equal(op.Unsqueeze(numbers, [0]), op.Unsqueeze(every, [1]))

        own = whose(group)
        # No image keeps more than TopK gives: its plan would have been refused.
        count = op.Min(op.Shape(quota), op.Shape(scores), [MAX_TOP_K])
        ranked = op.Where(own, op.Unsqueeze(scores, [0]), float("-inf"))
        _, index = op.TopK(ranked, count, axis=-1, largest=1, sorted=1, _outputs=2)
        places = op.ReduceSum(op.Cast(whose(quota), to=_FLOAT), [1], keepdims=1)
        rank = op.Cast(op.Range(0, op.Squeeze(count), 1), to=_FLOAT)
        taken = op.Cast(op.Less(op.Unsqueeze(rank, [0]), places), to=_FLOAT)
        alive = op.ScatterElements(op.Expand(0.0, op.Shape(own)), index, taken, axis=1)
        return Survivors(op.Cast(op.ReduceSum(alive, [0], keepdims=0), to=_INT64), op.Shape(quota))

    return choose
