"""Methods that drop tokens inside the LLM only, by attention (docs/methods.md).

All keep every token up to their first cut, and meet the budget's mean.
"""

from __future__ import annotations

import onnx_ir as ir

from sinkprune.contract.budgets import Budget, prune_layers, scaled_layers
from sinkprune.export.graph import FLOAT, Graph
from sinkprune.export.pruning.equal_mean import scaled_stages
from sinkprune.export.pruning.functions import unit_rows
from sinkprune.export.pruning.plan import PlanFacts, PlanGraphs
from sinkprune.export.pruning.select import QueryRows, Stage, build_selects, every_text_row


def last_row(graph: Graph, stage: Stage) -> QueryRows:
    """Return the row alone whose output becomes the first token: the last, if no rows of actions are after it."""
    return QueryRows(stage.predicting)


def text_like_the_image(graph: Graph, stage: Stage) -> QueryRows:
    """Return the text rows whose mean cosine with the visual rows exceeds its mean over text rows; all, if none does.

    These are SparseVLM's "raters". Rows are hidden states after the layer; text rows are those of `every_text_row`.
    """
    op = graph.op
    rows = every_text_row(graph, stage).rows

    def units(index: ir.Value) -> ir.Value:
        return unit_rows(op, op.Cast(op.Gather(stage.hidden, index, axis=1), to=FLOAT))

    image = op.ReduceMean(units(stage.visual), [1], keepdims=1)
    similarity = op.ReduceSum(op.Mul(units(rows), image), [0, 2], keepdims=0)
    above = op.Cast(op.Greater(similarity, op.ReduceMean(similarity, [0], keepdims=1)), to=FLOAT)
    nobody = op.Sub(1.0, op.ReduceMax(above, [0], keepdims=1))
    return QueryRows(rows, op.Add(above, nobody))


def fastv(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """Keep the visual tokens that the last token attends to most after layer 2 (0-based, of 32): FastV ("An Image is
    Worth 1/2 Tokens After Layer 2")."""
    cuts = scaled_layers((2,), facts.language_model.num_layers)
    kept = scaled_stages(facts, budget, cuts, [facts.nominal_tokens])
    return PlanGraphs(kept, select_after=build_selects(facts, kept, cuts, last_row))


def sparsevlm(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """Keep the budget's stages at our layers, queried by the text rows that are like the image: SparseVLM
    ("SparseVLM: Visual Token Sparsification for Efficient Vision-Language Model Inference").

    The paper chooses those rows once, by the embeddings before the LLM. A select chooses them by the hidden states
    after its own layer. The paper's recycling of dropped tokens is left out.
    """
    cuts = prune_layers(facts.language_model.num_layers)
    kept = scaled_stages(facts, budget, cuts, budget.resolve(facts.nominal_tokens).stages)
    return PlanGraphs(kept, select_after=build_selects(facts, kept, cuts, text_like_the_image))
