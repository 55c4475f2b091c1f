"""Greedy choices of one token a round, for methods that read the question before the LLM.

A round is a local ONNX function without a plugin, in a domain of its own. A graph calls it once for each token of the
largest image, because the runtimes reject Loop. An image that keeps fewer tokens keeps the first ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
from onnxscript import build_function

from sinkprune.export.graph import Graph
from sinkprune.export.pruning.functions import unit_rows
from sinkprune.export.pruning.plan import PlanFacts
from sinkprune.export.pruning.sanitizer import TowerValues, ascending
from sinkprune.export.pruning.shares import TokenCount, as_vector

DOMAIN = "sinkprune.rounds"

_FLOAT = ir.DataType.FLOAT


def rows_in_llm(facts: PlanFacts, graph: Graph, features: TowerValues) -> tuple[ir.Value, ir.Value]:
    """Return the unit rows of the visual tokens [G,N,d] and of the question's words [T,d], as the LLM receives them.

    Declares the inputs `embeddings` and `question`. Groups are joined as in `features`.
    """
    op, width = graph.op, facts.language_model.hidden_size
    embeddings = op.Cast(graph.input("embeddings", ["G", facts.visual_dim, width]), to=_FLOAT)
    question = op.Cast(graph.input("question", ["T", width]), to=_FLOAT)
    joined = op.Reshape(embeddings, op.Concat(op.Shape(features.norms), [width], axis=0))
    return unit_rows(op, joined), unit_rows(op, question)


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


def places(op: Any, values: ir.Value) -> ir.Value:
    """Return [N] int64: the numbers of the tokens of `values` [G,N]."""
    return op.Range(0, op.Squeeze(op.Shape(values, start=1, end=2)), 1)


def row_of(op: Any, matrix: ir.Value, index: ir.Value) -> ir.Value:
    """Return [G,1,R]: the row `index` [G,1] of `matrix` [G,N,R]."""
    return op.GatherND(matrix, op.Unsqueeze(index, [-1]), batch_dims=1)


def first_of(graph: Graph, chosen: Sequence[ir.Value], count: TokenCount) -> ir.Value:
    """Return [G,count]: the first `count` of the tokens `chosen` [G,1], in ascending order."""
    op = graph.op
    index = op.Concat(*chosen, axis=1)
    return ascending(graph, op.Slice(index, [0], as_vector(count), [1]), count)
