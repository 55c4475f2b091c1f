"""SinkPruner with one number changed: its prune layers, or the sanitizer's share of salient tokens.

`benchmarks/sensitivity.py` adds these methods to `sinkprune.export.methods`. All keep a budget's mean visual tokens a
layer, within half a token.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

from sinkprune.contract.budgets import Budget, Counts, prune_layers
from sinkprune.contract.errors import BudgetError
from sinkprune.export.methods.sinkpruner import build, build_after
from sinkprune.export.pruning.equal_mean import budget_mean, mean_tokens, shares_of
from sinkprune.export.pruning.plan import Method, PlanFacts, PlanGraphs

SHIFTS = {
    "all-earlier": (-1, -1, -1),
    "first-earlier": (-1, 0, 0),
    "second-earlier": (0, -1, 0),
    "third-earlier": (0, 0, -1),
    "first-later": (1, 0, 0),
    "second-later": (0, 1, 0),
    "third-later": (0, 0, 1),
    "all-later": (1, 1, 1),
}
"""The layers by which each of the three stages moves."""
SALIENT_PERCENT = (0, 25, 75, 100)
"""The share of salient tokens among the sanitizer's tokens without the sink; SinkPruner has 50 for LLaVA."""


def moved_layers(shift: str, num_layers: int) -> tuple[int, ...] | None:
    """Return the moved prune layers (0-based) of a decoder; None if two would coincide or one be out of range."""
    cuts = tuple(layer + by for layer, by in zip(prune_layers(num_layers), SHIFTS[shift], strict=True))
    return cuts if all(one < other for one, other in pairwise((-1, *cuts, num_layers - 1))) else None


def _moved(shift: str, facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """Return the same sanitizer, and stages after other layers, scaled alike to meet the budget's mean."""
    layers = facts.language_model.num_layers
    cuts = moved_layers(shift, layers)
    if cuts is None:
        raise BudgetError(f"a decoder of {layers} layers cannot have its stages moved as '{shift}' says.")
    counts, wanted = budget.resolve(facts.nominal_tokens), budget_mean(facts, budget)

    def scaled(per_mille: int) -> Counts:
        stages = (max(1, (stage * per_mille + 500) // 1000) for stage in counts.stages)
        return replace(counts, stages=tuple(min(counts.kept, stage) for stage in stages))

    nearest = min(map(scaled, range(1, 4000)), key=lambda found: abs(mean_tokens(found, cuts, layers) - wanted))
    return build_after(facts, shares_of(facts, budget, nearest), cuts)


def _shared(percent: int, facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """Return a sanitizer of as many tokens, `percent` of them salient and the others diverse."""
    counts = budget.resolve(facts.nominal_tokens)
    places = counts.reserve + counts.diverse
    salient = places * percent // 100
    return build(facts, shares_of(facts, budget, replace(counts, reserve=salient, diverse=places - salient)))


METHODS: dict[str, Method] = {
    **{shift: partial(_moved, shift) for shift in SHIFTS},
    **{f"salient-{percent}": partial(_shared, percent) for percent in SALIENT_PERCENT},
}
