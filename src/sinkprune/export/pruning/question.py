"""The question and the visual tokens as the LLM receives them, for sanitizers that read both."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from sinkprune.export.graph import Graph
from sinkprune.export.pruning.functions import unit_rows
from sinkprune.export.pruning.plan import PlanFacts
from sinkprune.export.pruning.sanitizer import TowerValues

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


def mean_cosines(op: Any, tokens: ir.Value, question: ir.Value) -> ir.Value:
    """Return [G,N]: the mean cosine of the unit rows `tokens` [G,N,d] with the unit rows `question` [T,d]."""
    # The product with the mean row.
    direction = op.Transpose(op.ReduceMean(question, [0], keepdims=1), perm=[1, 0])
    return op.Squeeze(op.MatMul(tokens, direction), [2])
