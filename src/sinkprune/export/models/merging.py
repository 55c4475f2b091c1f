"""Merging of similar tokens within a CLIP or SigLIP tower: the budgets' option `tower`.

Tokens are matched by their keys in two alternating sets, and the most similar pairs become one token, the average
weighted by how many places each stands for (ToMe, arXiv 2210.09461). A few early blocks merge fixed numbers, as in
iLLaVA (arXiv 2412.06263). Attention then counts a token once for each of its places.
"""

from __future__ import annotations

import onnx_ir as ir

from sinkprune.export.graph import FLOAT, INT64, WeightedGraph
from sinkprune.export.pruning.functions import SAME, gathered, unit_rows


class Merging:
    """The tokens of a tower of which blocks merge some, in raster order after `special` rows that are never merged.

    Ties go to lower indices. Salience is that of a block after the last merging.
    """

    def __init__(self, graph: WeightedGraph, tokens: int, special: int) -> None:
        self._graph, self._all, self._special = graph, tokens, special
        self.left = tokens
        """T: the tokens that are left."""
        self.bias: ir.Value | None = None
        """[G,1,R,R] float for R = special + T rows: what is added to scores; None before the first merging."""
        self.sizes: ir.Value | None = None
        """[G,R] fp32: the places that each row stands for; None before the first merging."""
        self._places: ir.Value
        self._owners: ir.Value

    def merge(self, x: ir.Value, key: ir.Value, count: int) -> ir.Value:
        """Return the rows `x` [G,R,D] with `count` tokens fewer, by the `key` [G,H,R,h] of each."""
        graph, special, total = self._graph, self._special, self.left
        op, end = graph.op, special + total

        def tokens_of(values: ir.Value, axis: int) -> ir.Value:
            return op.Cast(op.Slice(values, [special], [end], [axis]), to=FLOAT)

        def halves(values: ir.Value) -> list[ir.Value]:
            return [op.Slice(values, [start], [total], [1], [2]) for start in (0, 1)]

        def at(values: ir.Value, index: ir.Value) -> ir.Value:
            return op.GatherND(values, op.Unsqueeze(index, [-1]), batch_dims=1)

        groups = op.Shape(x, start=0, end=1)
        if self.sizes is None:
            every = op.Range(0.0, float(total), 1.0)
            self._places = self._owners = op.Expand(every, op.Concat(groups, [total], axis=0))
            self.sizes = op.Expand(1.0, op.Concat(groups, [end], axis=0))
        sizes, rows = tokens_of(self.sizes, 1), tokens_of(x, 1)
        unit = unit_rows(op, op.ReduceMean(tokens_of(key, 2), [1], keepdims=0))
        (near, far), (x_near, x_far), (size_near, size_far), (place_near, place_far) = map(
            halves, (unit, op.Mul(rows, op.Unsqueeze(sizes, [2])), sizes, self._places)
        )
        similarity = op.Min(op.MatMul(near, op.Transpose(far, perm=[0, 2, 1])), SAME)
        closeness = op.ReduceMax(similarity, [-1], keepdims=0)
        _, source = op.TopK(closeness, [count], axis=-1, largest=1, sorted=1, _outputs=2)
        target = at(op.ArgMax(similarity, axis=-1, keepdims=0), source)

        # [G,T/2,count]: which sources each of the other half takes.
        number = op.Unsqueeze(op.Range(0, total // 2, 1), [1])
        takes = op.Cast(op.Equal(op.Unsqueeze(target, [1]), number), to=FLOAT)
        x_far = op.Add(x_far, op.MatMul(takes, gathered(op, x_near, source)))
        taken = op.ReduceSum(op.Mul(takes, op.Unsqueeze(at(size_near, source), [1])), [2], keepdims=0)
        size_far = op.Add(size_far, taken)
        # Sums of products, because a GPU may round the numbers in a MatMul.
        place, joined = at(place_near, source), at(place_far, target)
        moves = op.Cast(op.Equal(op.Unsqueeze(self._owners, [2]), op.Unsqueeze(place, [1])), to=FLOAT)
        moved = op.ReduceSum(op.Mul(moves, op.Unsqueeze(op.Sub(joined, place), [1])), [2], keepdims=0)
        self._owners = op.Add(self._owners, moved)

        # In raster order, without the sources, whose slots come last.
        self.left = total - count
        nothing = op.Expand(0.0, op.Shape(closeness))
        gone = op.ScatterElements(nothing, source, op.Expand(float(total), op.Shape(source)), axis=1)
        slots = op.Concat(
            op.Add(op.Range(0.0, float(total), 2.0), gone),
            op.Expand(op.Range(1.0, float(total), 2.0), op.Shape(size_far)),
            axis=1,
        )
        _, order = op.TopK(slots, [self.left], axis=-1, largest=0, sorted=1, _outputs=2)
        sizes = at(op.Concat(size_near, size_far, axis=1), order)
        self._places = at(op.Concat(place_near, place_far, axis=1), order)
        rows = gathered(op, op.Concat(x_near, x_far, axis=1), order)
        x_new = op.CastLike(op.Div(rows, op.Unsqueeze(sizes, [2])), x)
        self.sizes = self._after_special(self.sizes, sizes)
        # Of every row, because libraries need a mask of all queries.
        square = op.Concat(groups, [1, special + self.left, special + self.left], axis=0)
        self.bias = op.CastLike(op.Expand(self._log_sizes(), square), x)
        return self._after_special(x, x_new)

    def counted(self, scores: ir.Value) -> ir.Value:
        """Return the fp32 scores [G,H,Q,R] of attention in which a key counts once for each of its places."""
        return self._graph.op.Add(scores, self._log_sizes())

    def of_every_place(self, weights: ir.Value) -> ir.Value:
        """Return the weights [G,H,R,R] with each row times the places that it stands for."""
        op = self._graph.op
        return op.Mul(weights, op.Unsqueeze(self.sizes, [1, 3]))

    def of_a_place(self, received: ir.Value | None) -> ir.Value | None:
        """Return what each row received, [G,R], as the mean of its places."""
        return self._graph.op.Div(received, self.sizes)

    def output(self) -> None:
        """Output `merged` [G,N] int64: the place of the token that stands for each place of the grid."""
        self._graph.output("merged", self._graph.op.Cast(self._owners, to=INT64), ["G", self._all], INT64)

    def _after_special(self, former: ir.Value, tokens: ir.Value) -> ir.Value:
        """Return the special rows of `former`, then `tokens`."""
        op = self._graph.op
        return op.Concat(op.Slice(former, [0], [self._special], [1]), tokens, axis=1) if self._special else tokens

    def _log_sizes(self) -> ir.Value:
        return self._graph.op.Unsqueeze(self._graph.op.Log(self.sizes), [1, 2])
