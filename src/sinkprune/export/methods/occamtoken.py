"""OccamToken: a token stays if its evidence exceeds a register's, before the LLM and, for the question, in it.

Source: Li et al., "OccamToken: Efficient VLM Inference with Training-Free and Budget-Adaptive Token Pruning"
(arXiv 2605.29657), of which we could read the abstract only. What it leaves open is ours: docs/method-choices.md.

The number of tokens varies by picture and question. `sinkprune-calibrate evidence` finds by how much evidence must
exceed the register's so that the mean over pictures meets the budget's.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from sinkprune.contract.budgets import Budget, Share, scaled_layers
from sinkprune.contract.plans import MAX_TOP_K
from sinkprune.export.graph import Graph
from sinkprune.export.pruning.equal_mean import third_after
from sinkprune.export.pruning.evidence import build_tested_selects, evidence_of_tokens
from sinkprune.export.pruning.functions import gathered, top_rho
from sinkprune.export.pruning.plan import EvidenceGraphs, PlanFacts, PlanGraphs
from sinkprune.export.pruning.sanitizer import ascending, largest, new_sanitizer, output_rows
from sinkprune.export.pruning.select import every_text_row

STAGE = 15
"""The layer of 32 (0-based) after which tokens are tested again: SinkPruner's last, which needs no other cut."""


def build(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """Return the plan of both tests. Its shares are upper bounds: all tokens."""
    cuts = scaled_layers((STAGE,), facts.language_model.num_layers)
    # Groups differ in how many tokens pass, so they are sanitised as one.
    facts = replace(facts, joined=True)
    kept = replace(
        budget,
        reserve=Share(1, 1),
        diverse=Share(0, 1),
        stages=(Share(1, 1),) * len(cuts),
        sanitizer=True,
        remove_outliers=True,
        aggregate=True,
        frames="together",
    )
    aims = tuple(Share(count, facts.nominal_tokens) for count in third_after(facts, budget, cuts[0]))
    measures, selects = build_tested_selects(facts, kept, cuts, every_text_row)
    evidence = EvidenceGraphs((evidence_of_tokens(facts, kept), *measures), aims)
    return PlanGraphs(kept, _sanitizer(facts, kept), selects, evidence=evidence)


def _sanitizer(facts: PlanFacts, kept: Budget) -> Graph:
    """Return the sanitizer: the register, which is the mean of the outliers, then the most salient other tokens.

    They are in raster order, and as many in all as the input `quota` [n0] is long. Salience ranks tokens as evidence
    does, so these are the tokens of most evidence.
    """
    graph, features = new_sanitizer(facts, kept)
    op, norms = graph.op, features.norms
    quota = graph.input("quota", ["n0"], ir.DataType.INT64)
    function, per_mille = top_rho(facts.dialect.OPSET), kept.outlier_per_mille
    register, outlier = op.call(function, norms, features.rows, per_mille=per_mille, _outputs=2)
    low = op.Sub(op.Shape(norms, start=1, end=2), [1])
    count = op.Min(op.Sub(op.Shape(quota), [1]), low, [MAX_TOP_K])
    index = ascending(graph, largest(graph, op.Where(outlier, float("-inf"), features.salience), count), count)
    rows = op.Concat(register, gathered(op, features.rows, index), axis=1)
    output_rows(graph, facts, kept, rows, op.Concat(largest(graph, norms, 1), index, axis=1), "n0")
    return graph
