"""Greedy choices of one token a round.

A round is a local ONNX function without a plugin, in a domain of its own. A graph calls it once for each token of the
largest image, because bundles may have no Loop. An image that keeps fewer tokens keeps the first ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from sinkprune.contract.budgets import Budget
from sinkprune.export.graph import Graph
from sinkprune.export.pruning.functions import local_function
from sinkprune.export.pruning.plan import PlanFacts, TokenCount, as_vector
from sinkprune.export.pruning.sanitizer import ascending, places

DOMAIN = "sinkprune.rounds"


def best_token(op: Any, gain: ir.Value, tolerance: ir.Value | float) -> ir.Value:
    """Return [G,1]: the first token whose gain [G,N] is the largest, up to `tolerance`.

    Equal gains may differ by rounding; the tolerance makes them tie on every runtime.
    """
    equal = op.Sub(op.ReduceMax(gain, [-1], keepdims=1), tolerance)
    _, index = op.TopK(op.Min(gain, equal), [1], axis=-1, largest=1, sorted=1, _outputs=2)
    return index


def chosen_in_rounds(
    facts: PlanFacts,
    kept: Budget,
    graph: Graph,
    name: str,
    body: Callable[..., Sequence[ir.Value]],
    fixed: Sequence[ir.Value],
    state: Sequence[ir.Value],
    count: Callable[[], TokenCount],
) -> ir.Value:
    """Return [G,count]: the first `count` of the tokens that as many rounds as `kept` needs choose, ascending.

    A round is the function `name`. Its `body` takes the operators, the numbers of the tokens [N], the values `fixed`
    and the `state`, the last of which is [G,N]. It returns the token [G,1] and the new state. Raises `BudgetError`
    for too many rounds.
    """
    most = facts.most_counts(kept).kept
    facts.check_rounds(most)
    function = local_function(DOMAIN, name, body, facts.dialect.OPSET)
    op, place, chosen = graph.op, places(graph, state[-1]), []
    for _ in range(most):
        index, *state = op.call(function, place, *fixed, *state)
        chosen.append(index)
    first = count()
    return ascending(graph, op.Slice(op.Concat(*chosen, axis=1), [0], as_vector(first), [1]), first)
