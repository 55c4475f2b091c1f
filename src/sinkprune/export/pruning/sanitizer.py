"""The visual sanitizer as a graph, and what it reads of questions.

An index is int64 [G,K], a mask bool [G,N]. Ties go to the lower index, as in ONNX TopK.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import onnx_ir as ir

from sinkprune.contract.budgets import Budget
from sinkprune.export.graph import BOOL, FLOAT, INT64, Dim, Graph
from sinkprune.export.pruning.functions import diversity_rounds, diversity_select, gathered, preferring_select
from sinkprune.export.pruning.plan import PlanFacts, TokenCount, as_vector, rows_kept


class TowerValues(NamedTuple):
    """The vision tower's outputs."""

    tokens: ir.Value
    """[G,N,D] float."""
    norms: ir.Value
    """[G,N] fp32: the norm of each token where the family has its outliers, which need not be that of `tokens`
    (docs/method.md)."""
    salience: ir.Value
    """[G,N] fp32: the attention that each token receives."""
    rows: ir.Value
    """[G,N,D'] float: `tokens`, each followed by its DeepStack features, which play no part in the choice."""


def new_sanitizer(facts: PlanFacts, kept: Budget) -> tuple[Graph, TowerValues]:
    """Return an empty `sanitizer` for the shares `kept`, and its inputs, joined if groups are sanitised as one."""
    graph, n = Graph("sanitizer", facts.precision, facts.dialect), facts.visual_dim
    rows = tokens = graph.input("tokens", ["G", n, facts.visual_width])
    norms = graph.input("norms", ["G", n], FLOAT)
    salience = graph.input("salience", ["G", n], FLOAT)
    if facts.deepstack:
        # Joined to one row, so that tokens and features are gathered and averaged together.
        rows = graph.op.Concat(tokens, graph.input("deepstack", ["G", n, facts.deepstack_width]), axis=-1)
    features = TowerValues(tokens, norms, salience, rows)
    return graph, _joined(graph, facts, features) if facts.as_one(kept) else features


def output_tokens(graph: Graph, facts: PlanFacts, kept: Budget, features: TowerValues, index: ir.Value) -> None:
    """Output the tokens `index` [G,n0], or [1,n0] for all groups alike, in this order."""
    index = in_every_group(graph, features, index)
    output_rows(graph, facts, kept, gathered(graph.op, features.rows, index), index)


def output_rows(graph: Graph, facts: PlanFacts, kept: Budget, rows: ir.Value, index: ir.Value) -> None:
    """Output `rows` [G,n0,D'], as in `TowerValues.rows`, and the token of each, `index` [G,n0]."""
    count, width, features = rows_kept(facts, kept), facts.visual_width, None
    groups: Dim = 1 if facts.as_one(kept) else "G"
    if facts.deepstack:
        rows, features = graph.op.Split(rows, [width, facts.deepstack_width], axis=-1, _outputs=2)
    graph.output("kept_tokens", rows, [groups, count, width])
    graph.output("kept_index", index, [groups, count], INT64)
    if features is not None:
        graph.output("kept_deepstack", features, [groups, count, facts.deepstack_width])


def in_every_group(graph: Graph, features: TowerValues, index: ir.Value) -> ir.Value:
    """Return `index` [1,K] or [G,K] as [G,K]."""
    op = graph.op
    return op.Expand(index, op.Concat(op.Slice(_sizes(graph, features), [0], [1]), [1], axis=0))


def largest(graph: Graph, values: ir.Value, count: TokenCount) -> ir.Value:
    """Return the index of the `count` largest of each row of `values` [G,N], largest first."""
    _, index = graph.op.TopK(values, as_vector(count), axis=-1, largest=1, sorted=1, _outputs=2)
    return index


def smallest(graph: Graph, values: ir.Value, count: TokenCount) -> ir.Value:
    """Return the index of the `count` smallest of each row of `values` [G,N], smallest first."""
    _, index = graph.op.TopK(values, as_vector(count), axis=-1, largest=0, sorted=1, _outputs=2)
    return index


def ascending(graph: Graph, index: ir.Value, count: TokenCount) -> ir.Value:
    """Return the `count` indices of each row in ascending order. fp32 holds every index up to 2**24 exactly."""
    op = graph.op
    ordered, _ = op.TopK(op.Cast(index, to=FLOAT), as_vector(count), axis=-1, largest=0, sorted=1, _outputs=2)
    return op.Cast(ordered, to=INT64)


def least_similar(
    graph: Graph,
    facts: PlanFacts,
    kept: Budget,
    tokens: ir.Value,
    candidate: ir.Value,
    reserved: ir.Value,
    count: TokenCount,
    most: int,
    preference: ir.Value | None = None,
) -> ir.Value:
    """Return the index of the `count` candidates, at most `most`, that are least similar to `reserved` and to each
    other, ascending: `DiversitySelect`, or with a preference [G,N] `PreferringSelect`."""
    least = kept.diversity_rounds
    select, preferred = (diversity_select, []) if preference is None else (preferring_select, [preference])
    function = select(diversity_rounds(count, most, least), facts.dialect.OPSET)
    return graph.op.call(function, tokens, candidate, reserved, as_vector(count), *preferred, rounds=least)


def mask_of(graph: Graph, features: TowerValues, index: ir.Value) -> ir.Value:
    """Return the mask of the tokens `index`."""
    op = graph.op
    nowhere = op.Expand(0, op.Shape(features.norms))
    return op.Cast(op.ScatterElements(nowhere, index, op.Expand(1, op.Shape(index)), axis=1), to=BOOL)


def places(graph: Graph, values: ir.Value) -> ir.Value:
    """Return [N] int64: the numbers of the tokens of `values` [G,N]."""
    op = graph.op
    return op.Range(0, op.Squeeze(op.Shape(values, start=1, end=2)), 1)


def _joined(graph: Graph, facts: PlanFacts, features: TowerValues) -> TowerValues:
    """Return the features of all groups as one: [1,G*N,D] and [1,G*N]."""
    op = graph.op
    tokens = op.ReduceProd(_sizes(graph, features), [0], keepdims=1)
    flat = op.Concat([1], tokens, axis=0)

    def rows_of(x: ir.Value, width: int) -> ir.Value:
        return op.Reshape(x, op.Concat(flat, [width], axis=0))

    norms, salience = (op.Reshape(x, flat) for x in (features.norms, features.salience))
    rows = tokens = rows_of(features.tokens, facts.visual_width)
    if facts.deepstack:
        rows = rows_of(features.rows, facts.visual_width + facts.deepstack_width)
    return TowerValues(tokens, norms, salience, rows)


def _sizes(graph: Graph, features: TowerValues) -> ir.Value:
    """Return [2] int64: G and N, from the shapes of all inputs, because TensorRT drops unused inputs."""
    op = graph.op
    return op.Max(*(op.Shape(feature, start=0, end=2) for feature in dict.fromkeys(features)))


def rows_in_llm(facts: PlanFacts, graph: Graph, features: TowerValues) -> tuple[ir.Value, ir.Value]:
    """Return the rows of the visual tokens [G,N,d] and of the question's words [T,d], fp32, as the LLM receives them.

    Declares the inputs `embeddings` and `question`. Groups are joined as in `features`.
    """
    op, width = graph.op, facts.language_model.hidden_size
    embeddings = op.Cast(graph.input("embeddings", ["G", facts.visual_dim, width]), to=FLOAT)
    question = op.Cast(graph.input("question", ["T", width]), to=FLOAT)
    joined = op.Reshape(embeddings, op.Concat(op.Shape(features.norms), [width], axis=0))
    return joined, question


def mean_cosines(op: Any, tokens: ir.Value, question: ir.Value) -> ir.Value:
    """Return [G,N]: the mean cosine of the unit rows `tokens` [G,N,d] with the unit rows `question` [T,d]."""
    # The product with the mean row.
    direction = op.Transpose(op.ReduceMean(question, [0], keepdims=1), perm=[1, 0])
    return op.Squeeze(op.MatMul(tokens, direction), [2])
