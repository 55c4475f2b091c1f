"""`select_after_<layer>` of the graph contract: the text-guided stage between two decoder segments.

method.md section 2. Scoring reads the asking rows only, so no [S,T] matrix exists anywhere. Methods differ in which
rows ask (`Asking`); the scorer is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import onnx_ir as ir

from sinkprune.contract.budgets import Budget, Share
from sinkprune.contract.manifest import LanguageModel
from sinkprune.export.graph import Dim, Graph
from sinkprune.export.pruning.functions import unit_rows
from sinkprune.export.pruning.plan import PlanFacts
from sinkprune.export.pruning.shares import of_all_groups
from sinkprune.export.pruning.survivors import Choice, best, best_of_each_image

_FLOAT = ir.DataType.FLOAT
_INT64 = ir.DataType.INT64


class Stage(NamedTuple):
    """What a stage is given to score its visual rows by."""

    hidden: ir.Value
    """[1,S,d] float."""
    query: ir.Value
    """[1,H,S,h] float."""
    key: ir.Value
    """[1,Hkv,S,h] float."""
    visual: ir.Value
    """[V] int64: visual rows."""
    text: ir.Value
    """[L] int64: text rows behind them."""
    size: ir.Value
    """[1] int64: S."""


class Asked(NamedTuple):
    """The rows whose attention counts."""

    rows: ir.Value
    """[R] int64."""
    weights: ir.Value | None = None
    """[R] fp32: how much each counts; None where all count alike."""


Asking = Callable[[Graph, Stage], Asked]
"""Writes into a graph which rows ask."""


def every_text_row(graph: Graph, stage: Stage) -> Asked:
    """Every text row behind the image; the last row where there is none (method.md section 2)."""
    op = graph.op
    # L = 0: the last row asks instead
    rows = op.Concat(stage.text, last_row(graph, stage).rows, axis=0)
    return Asked(op.Slice(rows, [0], op.Max(op.Shape(stage.text), [1]), [0]))


def last_row(graph: Graph, stage: Stage) -> Asked:
    """The last row alone, whose output becomes the first token."""
    return Asked(graph.op.Sub(stage.size, [1]))


def text_like_the_image(graph: Graph, stage: Stage) -> Asked:
    """The text rows whose mean cosine with the visual rows exceeds its mean over the text rows; all, if none does.

    SparseVLM's "raters". Rows are hidden states behind the layer, the text rows those of `every_text_row`.
    """
    op = graph.op
    rows = every_text_row(graph, stage).rows

    def units(index: ir.Value) -> ir.Value:
        return unit_rows(op, op.Cast(op.Gather(stage.hidden, index, axis=1), to=_FLOAT))

    image = op.ReduceMean(units(stage.visual), [1], keepdims=1)
    similarity = op.ReduceSum(op.Mul(units(rows), image), [0, 2], keepdims=0)
    above = op.Cast(op.Greater(similarity, op.ReduceMean(similarity, [0], keepdims=1)), to=_FLOAT)
    nobody = op.Sub(1.0, op.ReduceMax(above, [0], keepdims=1))
    return Asked(rows, op.Add(above, nobody))


def build_selects(facts: PlanFacts, kept: Budget, cuts: Sequence[int], asking: Asking) -> dict[int, Graph]:
    """A select after each of the layers `cuts` (0-based) that keeps the share of visual rows that its stage of `kept`
    says, by layer; raises `BudgetError` for more than TensorRT ranks.
    """
    selects = {}
    stages: Sequence[int | Share] = kept.stages
    if isinstance(facts.tokens, int):
        stages = kept.resolve(facts.tokens).stages
    for layer, stage in zip(cuts, stages, strict=True):
        selects[layer] = Graph(f"select_after_{layer}", facts.precision, facts.dialect)
        rows = of_all_groups(stage, facts)
        facts.check_ranked(rows if isinstance(rows, int) else rows.of(facts.most_visual_tokens))
        choice = best_of_each_image(facts.images) if facts.images > 1 else best(rows, facts.visual_dim)
        build_select(selects[layer], facts.language_model, choice, kept, asking)
    return selects


def build_select(graph: Graph, model: LanguageModel, choice: Choice, budget: Budget, asking: Asking) -> None:
    """Keep the visual rows of `choice`, by the attention the asking rows pay them, and every other row, in order."""
    op, h = graph.op, model.head_dim
    table: list[Dim] = [1, "S", h // 2]
    hidden = graph.input("hidden", [1, "S", model.hidden_size])
    cos, sin = graph.input("cos", table), graph.input("sin", table)
    query = graph.input("query", [1, model.num_heads, "S", h])
    key = graph.input("key", [1, model.num_kv_heads, "S", h])
    visual = graph.input("visual_index", ["V"], _INT64)
    text = graph.input("text_index", ["L"], _INT64)

    stage = Stage(hidden, query, key, visual, text, op.Shape(query, start=2, end=3))
    scores = received_attention(graph, model, stage, budget, asking)
    alive, left = choice(graph, scores)

    rows = op.Shape(hidden, start=1, end=2)
    survives = op.ScatterElements(op.Expand(1, rows), visual, alive, axis=0)
    place = op.Sub(graph.dialect.running_sum(op, survives), 1)
    new_rows = op.Add(op.Sub(rows, op.Shape(visual)), left)
    keep = _where_alive(graph, op.Range(0, op.Squeeze(rows), 1), survives, new_rows)
    visual_out = _where_alive(graph, op.Gather(place, visual, axis=0), alive, left)

    def kept_rows(x: ir.Value) -> ir.Value:
        return op.Gather(x, keep, axis=1)

    def positions(x: ir.Value) -> ir.Value:
        return kept_rows(x) if budget.positions == "keep" else op.Slice(x, [0], new_rows, [1])

    graph.output("hidden_out", kept_rows(hidden), [1, "S2", model.hidden_size])
    graph.output("cos_out", positions(cos), [1, "S2", h // 2])
    graph.output("sin_out", positions(sin), [1, "S2", h // 2])
    graph.output("visual_index_out", visual_out, ["V2"], _INT64)
    graph.output("text_index_out", op.Gather(place, text, axis=0), ["L"], _INT64)
    graph.output("keep_index", keep, ["S2"], _INT64)


def received_attention(graph: Graph, model: LanguageModel, stage: Stage, budget: Budget, asking: Asking) -> ir.Value:
    """p [V] fp32: the attention each visual row receives from the asking rows, mean over rows and heads."""
    op, h = graph.op, model.head_dim
    repeats = model.num_heads // model.num_kv_heads
    asked, rated = asking(graph, stage)

    q = op.Cast(op.Gather(stage.query, asked, axis=2), to=_FLOAT)
    # The query heads of a group stand together, so that keys need not be repeated.
    q = op.Reshape(q, [1, model.num_kv_heads, -1, h])
    k = op.Transpose(op.Cast(stage.key, to=_FLOAT), perm=[0, 1, 3, 2])
    logits = op.MatMul(op.Mul(q, h**-0.5), k)
    seen = op.LessOrEqual(op.Unsqueeze(op.Range(0, op.Squeeze(stage.size), 1), [0]), op.Unsqueeze(asked, [1]))
    if budget.scores_over == "visual_keys":
        logits, seen = op.Gather(logits, stage.visual, axis=3), op.Gather(seen, stage.visual, axis=1)
    hidden_keys = op.Where(op.Tile(seen, [repeats, 1]), 0.0, -3.4028234663852886e38)
    weights = op.Softmax(op.Add(logits, hidden_keys), axis=-1)
    if rated is not None:
        weights = op.Mul(weights, op.Unsqueeze(op.Tile(rated, [repeats]), [-1]))
    received = op.ReduceMean(weights, [0, 1, 2], keepdims=0)
    return received if budget.scores_over == "visual_keys" else op.Gather(received, stage.visual, axis=0)


def _where_alive(graph: Graph, values: ir.Value, alive: ir.Value, count: ir.Value) -> ir.Value:
    """The `count` values whose `alive` is 1, in their order, without sorting and without a data-dependent shape."""
    op = graph.op
    # The dead are all scattered to one slot behind the last survivor, which the slice cuts off.
    slot = op.Where(op.Equal(alive, 1), op.Sub(graph.dialect.running_sum(op, alive), 1), count)
    # The target is longer than needed because TensorRT scatters into nothing shorter than the indices.
    nothing = op.Expand(0, op.Add(op.Shape(values), [1]))
    gathered = op.ScatterElements(nothing, slot, values, axis=0)
    return op.Slice(gathered, [0], count, [0])
