"""The text-guided select as a graph: which rows survive a pruning layer.

Attention of a few querying rows scores the visual rows, so no [S,T] matrix exists. Methods differ in which rows query
(`ChooseQueries`), and share the scorer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import onnx_ir as ir

from sinkprune.contract.budgets import MAX_TOP_K, Budget, Share
from sinkprune.export.graph import FLOAT, INT64, Dim, Graph
from sinkprune.export.pruning.plan import PlanFacts, of_all_groups, share_of

_END = 2**31 - 1


class Survivors(NamedTuple):
    """The survivors of a stage's V visual rows."""

    alive: ir.Value
    """[V] int64: 1 for a row that survives, else 0."""
    left: ir.Value
    """[1] int64: the number of survivors, which depends on shapes only."""


class Stage(NamedTuple):
    """The inputs of a stage that scores depend on."""

    hidden: ir.Value
    """[1,S,d] float."""
    query: ir.Value
    """[1,H,S,h] float."""
    key: ir.Value
    """[1,Hkv,S,h] float."""
    visual: ir.Value
    """[V] int64: the visual rows."""
    text: ir.Value
    """[L] int64: the text rows after them."""
    size: ir.Value
    """[1] int64: S."""
    predicting: ir.Value
    """[1] int64: the row whose output becomes the first token or action."""


SelectionRule = Callable[[Graph, Stage, ir.Value], Survivors]
"""Chooses by the rows' scores [V] fp32, and declares the inputs that it needs. Ties go to the earlier row."""


def best_of_one_image(kept: int | Share, tokens: Dim = "N") -> SelectionRule:
    """Return a choice of the `kept` best of one image. A share is of all G*N tokens of `norms` [G,`tokens`]."""

    def choose(graph: Graph, stage: Stage, scores: ir.Value) -> Survivors:
        op, count = graph.op, count_of_one_image(graph, scores, kept, tokens)
        _, index = op.TopK(scores, count, axis=-1, largest=1, sorted=1, _outputs=2)
        nobody = op.Expand(0, op.Shape(scores))
        return Survivors(op.ScatterElements(nobody, index, op.Expand(1, op.Shape(index)), axis=0), count)

    return choose


def count_of_one_image(graph: Graph, scores: ir.Value, kept: int | Share, tokens: Dim) -> ir.Value:
    """Return [1] int64: the rows of `scores` [V] that survive of one image, as in `best_of_one_image`."""
    op = graph.op
    most: ir.Value | list[int]
    if isinstance(kept, Share):
        norms = graph.input("norms", ["G", tokens], FLOAT)
        most = share_of(op, op.Mul(op.Shape(norms, start=0, end=1), op.Shape(norms, start=1, end=2)), kept)
    else:
        most = [kept]
    # If K_s >= V, every visual row survives.
    return op.Min(op.Shape(scores), most)


class Quotas(NamedTuple):
    """The rows of each of I images, and how many survive. The number of survivors is the length of an input, because
    no compiler takes a shape that depends on values."""

    own: ir.Value
    """[I,V] bool: the rows of each image."""
    places: ir.Value
    """[I,1] fp32: how many of them survive."""
    left: ir.Value
    """[1] int64: how many survive of all images."""


def quotas_of_images(graph: Graph, images: int) -> Quotas:
    """Return the quotas of up to `images` images.

    The inputs `quota` [V2] and `visual_group` [V] hold image numbers; an image keeps as many rows as `quota` has of
    it.
    """
    op = graph.op
    group, quota = graph.input("visual_group", ["V"], INT64), graph.input("quota", ["V2"], INT64)
    every = list(range(images))

    def whose(numbers: ir.Value) -> ir.Value:
        return op.Equal(op.Unsqueeze(numbers, [0]), op.Unsqueeze(every, [1]))

    places = op.ReduceSum(op.Cast(whose(quota), to=FLOAT), [1], keepdims=1)
    return Quotas(whose(group), places, op.Shape(quota))


def best_of_each_image(images: int) -> SelectionRule:
    """Return a choice of the best of each of up to `images` images.

    Images are ranked in a table of `images` x V; to compare rows pairwise would take V x V.
    """

    def choose(graph: Graph, stage: Stage, scores: ir.Value) -> Survivors:
        op, (own, places, left) = graph.op, quotas_of_images(graph, images)
        # No image keeps more than TopK returns: the export rejects such a plan.
        count = op.Min(left, op.Shape(scores), [MAX_TOP_K])
        ranked = op.Where(own, op.Unsqueeze(scores, [0]), float("-inf"))
        _, index = op.TopK(ranked, count, axis=-1, largest=1, sorted=1, _outputs=2)
        rank = op.Cast(op.Range(0, op.Squeeze(count), 1), to=FLOAT)
        taken = op.Cast(op.Less(op.Unsqueeze(rank, [0]), places), to=FLOAT)
        alive = op.ScatterElements(op.Expand(0.0, op.Shape(own)), index, taken, axis=1)
        return Survivors(op.Cast(op.ReduceSum(alive, [0], keepdims=0), to=INT64), left)

    return choose


def best_rows(facts: PlanFacts, kept: int | Share) -> SelectionRule:
    """Return a choice of the best rows: `kept` of one image, or the quota of each image."""
    facts.check_ranked(kept if isinstance(kept, int) else kept.of(facts.most_visual_tokens))
    return best_of_each_image(facts.images) if facts.images > 1 else best_of_one_image(kept, facts.visual_dim)


class QueryRows(NamedTuple):
    """The rows whose attention counts."""

    rows: ir.Value
    """[R] int64."""
    weights: ir.Value | None = None
    """[R] fp32: the weight of each; None for equal weights."""


ChooseQueries = Callable[[Graph, Stage], QueryRows]
"""Writes the choice of querying rows into a graph."""


def every_text_row(graph: Graph, stage: Stage) -> QueryRows:
    """Return every text row after the image, or the last row if there is none (method.md section 2)."""
    op = graph.op
    # If L = 0, the last row queries instead.
    rows = op.Concat(stage.text, stage.predicting, axis=0)
    return QueryRows(op.Slice(rows, [0], op.Max(op.Shape(stage.text), [1]), [0]))


def build_selects(
    facts: PlanFacts,
    kept: Budget,
    cuts: Sequence[int],
    queries: ChooseQueries,
    rule: Callable[[PlanFacts, int | Share], SelectionRule] = best_rows,
) -> dict[int, Graph]:
    """Return the selects after the layers `cuts` (0-based), by layer, one for each stage of `kept`.

    Raises `BudgetError` for more rows than TensorRT ranks.
    """
    selects = {}
    stages: Sequence[int | Share] = kept.stages
    if isinstance(facts.tokens, int):
        stages = kept.resolve(facts.tokens).stages
    for layer, stage in zip(cuts, stages, strict=True):
        selects[layer] = Graph(f"select_after_{layer}", facts.precision, facts.dialect)
        choice = rule(facts, of_all_groups(stage, facts))
        build_select(selects[layer], facts, choice, kept, queries)
    return selects


def build_select(
    graph: Graph, facts: PlanFacts, choice: SelectionRule, budget: Budget, queries: ChooseQueries
) -> None:
    """Write a select that keeps, in order, the visual rows of `choice` and every other row.

    Scores are the attention of the querying rows, mean over all heads.
    """
    op, model, h = graph.op, facts.language_model, facts.language_model.head_dim
    table: list[Dim] = [1, "S", h // 2]
    hidden = graph.input("hidden", [1, "S", model.hidden_size])
    cos, sin = graph.input("cos", table), graph.input("sin", table)
    query = graph.input("query", [1, model.num_heads, "S", h])
    key = graph.input("key", [1, model.num_kv_heads, "S", h])
    visual, text = graph.input("visual_index", ["V"], INT64), graph.input("text_index", ["L"], INT64)
    size = op.Shape(query, start=2, end=3)
    predicting = op.Sub(size, [1])
    if facts.action_rows:
        # It is the first of the rows that become actions, and the last of the text.
        predicting = op.Slice(text, [0], [1]) if budget.queries else op.Slice(text, [-1], [_END])
    stage = Stage(hidden, query, key, visual, text, size, predicting)
    alive, left = choice(graph, stage, _received_attention(graph, facts, stage, budget, queries))

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
    graph.output("visual_index_out", visual_out, ["V2"], INT64)
    graph.output("text_index_out", op.Gather(place, text, axis=0), ["L"], INT64)
    graph.output("keep_index", keep, ["S2"], INT64)


def _received_attention(
    graph: Graph, facts: PlanFacts, stage: Stage, budget: Budget, queries: ChooseQueries
) -> ir.Value:
    """Return p [V] fp32: the attention of the querying rows to each visual row, mean over rows and heads."""
    op, model, h = graph.op, facts.language_model, facts.language_model.head_dim
    repeats = model.num_heads // model.num_kv_heads
    querying, weighted = queries(graph, stage)

    q = op.Cast(op.Gather(stage.query, querying, axis=2), to=FLOAT)
    # Query heads of a group are adjacent, so that keys need not be repeated.
    q = op.Reshape(q, [1, model.num_kv_heads, -1, h])
    k = op.Transpose(op.Cast(stage.key, to=FLOAT), perm=[0, 1, 3, 2])
    logits = op.MatMul(op.Mul(q, h**-0.5), k)
    # The last row sees all rows, as every row does in a decoder that is not causal.
    last = querying if facts.causal else op.Max(querying, op.Sub(stage.size, [1]))
    seen = op.LessOrEqual(op.Unsqueeze(op.Range(0, op.Squeeze(stage.size), 1), [0]), op.Unsqueeze(last, [1]))
    if budget.scores_over == "visual_keys":
        logits, seen = op.Gather(logits, stage.visual, axis=3), op.Gather(seen, stage.visual, axis=1)
    hidden_keys = op.Where(op.Tile(seen, [repeats, 1]), 0.0, -3.4028234663852886e38)
    weights = op.Softmax(op.Add(logits, hidden_keys), axis=-1)
    if weighted is not None:
        weights = op.Mul(weights, op.Unsqueeze(op.Tile(weighted, [repeats]), [-1]))
    received = op.ReduceMean(weights, [0, 1, 2], keepdims=0)
    return received if budget.scores_over == "visual_keys" else op.Gather(received, stage.visual, axis=0)


def _where_alive(graph: Graph, values: ir.Value, alive: ir.Value, count: ir.Value) -> ir.Value:
    """Return the `count` values whose `alive` is 1, in order, without sorting or a data-dependent shape."""
    op = graph.op
    # All other values go to one slot after the last survivor, which the slice cuts off.
    slot = op.Where(op.Equal(alive, 1), op.Sub(graph.dialect.running_sum(op, alive), 1), count)
    # The target is longer than needed, because TensorRT requires one at least as long as the indices.
    nothing = op.Expand(0, op.Add(op.Shape(values), [1]))
    gathered = op.ScatterElements(nothing, slot, values, axis=0)
    return op.Slice(gathered, [0], count, [0])
