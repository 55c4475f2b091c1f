"""The evidence of visual tokens, in units of that of a register: the graphs `evidence` and `evidence_after_<layer>`.

A register is a token that takes up attention and holds little of the picture. Towers without registers of their own
use tokens of the picture in their place, the outliers of largest norm ("Vision Transformers Need Registers"). So a
picture's register is its outliers. In the LLM it is the row of their mean.

These graphs measure evidence only. The host counts the tokens whose evidence exceeds a threshold, because no compiler
takes a shape that depends on values. The graphs that keep tokens read the count from the length of `quota`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from sinkprune.contract.budgets import Budget
from sinkprune.export.graph import Graph
from sinkprune.export.pruning.plan import PlanFacts
from sinkprune.export.pruning.sanitizer import largest
from sinkprune.export.pruning.select import ChooseQueries, build_select, declare_stage, received_attention
from sinkprune.export.pruning.shares import outlier_count
from sinkprune.export.pruning.survivors import best_of_each_image

LEAST = 1e-30
"""The evidence of a register without attention, to divide by."""
_FLOAT = ir.DataType.FLOAT


def evidence_of_tokens(facts: PlanFacts, kept: Budget) -> Graph:
    """Return `evidence`: the salience of each token over the mean salience of the outliers of all groups.

    Inputs: norms [G,N], salience [G,N]. Output: evidence [1,G*N] fp32, -inf for the outliers.
    """
    graph, n = Graph("evidence", facts.precision, facts.dialect), facts.visual_dim
    op = graph.op
    norms, salience = (op.Reshape(graph.input(name, ["G", n], _FLOAT), [1, -1]) for name in ("norms", "salience"))
    outliers = largest(graph, norms, outlier_count(op, op.Shape(norms, start=1, end=2), [kept.outlier_per_mille]))
    register = op.ReduceMean(op.GatherElements(salience, outliers, axis=1), [1], keepdims=1)
    evidence = _over(op, salience, register)
    lowest = op.Expand(float("-inf"), op.Shape(outliers))
    graph.output("evidence", op.ScatterElements(evidence, outliers, lowest, axis=1), [1, "M"], _FLOAT)
    return graph


def build_tested_selects(
    facts: PlanFacts, kept: Budget, cuts: Sequence[int], queries: ChooseQueries
) -> tuple[list[Graph], dict[int, Graph]]:
    """Return the graphs `evidence_after_<layer>` for the layers `cuts`, and the selects that keep what passes.

    Evidence is the attention of the querying rows to each visual row, over that to the register of its picture.
    Inputs are those of a select, and `register` [V] int64: the place of its picture's register, for each visual row.
    """
    measures, selects = [], {}
    for layer in cuts:
        graph = Graph(f"evidence_after_{layer}", facts.precision, facts.dialect)
        attention = received_attention(graph, facts, declare_stage(graph, facts.language_model), kept, queries)
        register = graph.op.Gather(attention, graph.input("register", ["V"], ir.DataType.INT64), axis=0)
        graph.output("evidence", _over(graph.op, attention, register), ["V"], _FLOAT)
        measures.append(graph)
        selects[layer] = Graph(f"select_after_{layer}", facts.precision, facts.dialect)
        build_select(selects[layer], facts, best_of_each_image(facts.images), kept, None)
    return measures, selects


def _over(op: Any, values: ir.Value, register: ir.Value) -> ir.Value:
    return op.Div(values, op.Max(register, LEAST))
