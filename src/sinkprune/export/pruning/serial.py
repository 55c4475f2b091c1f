"""Greedy choices of one token a round.

A round is a local ONNX function without a plugin, in a domain of its own. A graph calls it once for each token of the
largest image, because bundles may have no Loop. An image that keeps fewer tokens keeps the first ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
from onnxscript import build_function

from sinkprune.export.graph import Graph
from sinkprune.export.pruning.sanitizer import ascending, places
from sinkprune.export.pruning.shares import TokenCount, as_vector

DOMAIN = "sinkprune.rounds"


def round_function(
    name: str, body: Callable[..., Sequence[ir.Value]], inputs: Sequence[str], opset: int
) -> ir.Function:
    """Return a round: `body`, given operators and the values `inputs`, as a local function of `DOMAIN`."""
    values = [ir.Value(name=value) for value in inputs]
    return build_function(body, values, domain=DOMAIN, name=name, opset_imports={"": opset})


def best_token(op: Any, gain: ir.Value, tolerance: ir.Value | float) -> ir.Value:
    """Return [G,1]: the first token whose gain [G,N] is the largest, up to `tolerance`.

    Equal gains may differ by rounding; the tolerance makes them tie on every runtime.
    """
    equal = op.Sub(op.ReduceMax(gain, [-1], keepdims=1), tolerance)
    _, index = op.TopK(op.Min(gain, equal), [1], axis=-1, largest=1, sorted=1, _outputs=2)
    return index


def row_of(op: Any, matrix: ir.Value, index: ir.Value) -> ir.Value:
    """Return [G,1,R]: the row `index` [G,1] of `matrix` [G,N,R]."""
    return op.GatherND(matrix, op.Unsqueeze(index, [-1]), batch_dims=1)


def chosen_in_rounds(
    graph: Graph,
    function: ir.Function,
    most: int,
    fixed: Sequence[ir.Value],
    state: Sequence[ir.Value],
    count: Callable[[], TokenCount],
) -> ir.Value:
    """Return [G,count]: the first `count` of the tokens that `most` rounds choose, in ascending order.

    A round takes the numbers of the tokens [N], the values `fixed` and the `state`, the last of which is [G,N]. It
    returns the token [G,1] and the new state.
    """
    op, place, chosen = graph.op, places(graph, state[-1]), []
    for _ in range(most):
        index, *state = op.call(function, place, *fixed, *state)
        chosen.append(index)
    first = count()
    return ascending(graph, op.Slice(op.Concat(*chosen, axis=1), [0], as_vector(first), [1]), first)
