"""SinkPruner with one number changed: where it prunes, or how the sanitizer's places are shared.

Methods like those of `sinkprune.export.methods`, found there while `benchmarks/sensitivity.py` exports. All keep a
budget's mean visual tokens a layer, within half a token.
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
"""By how many layers each of the three stages is moved."""
SALIENT_PERCENT = (0, 25, 75, 100)
"""Of the sanitizer's places beside the sink, how many go to salient tokens; SinkPruner has 50 for LLaVA."""


def moved_layers(shift: str, num_layers: int) -> tuple[int, ...] | None:
    """The prune layers (0-based) of a decoder, moved; None where two would fall together or none be in front."""
    cuts = tuple(layer + by for layer, by in zip(prune_layers(num_layers), SHIFTS[shift], strict=True))
    return cuts if all(one < other for one, other in pairwise((-1, *cuts, num_layers - 1))) else None


def _moved(shift: str, facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """The same sanitizer, and stages behind other layers, scaled alike to meet the budget's mean."""
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
    """As many places, `percent` of them for salient tokens and the others for diverse ones."""
    counts = budget.resolve(facts.nominal_tokens)
    places = counts.reserve + counts.diverse
    salient = places * percent // 100
    return build(facts, shares_of(facts, budget, replace(counts, reserve=salient, diverse=places - salient)))


METHODS: dict[str, Method] = {
    **{shift: partial(_moved, shift) for shift in SHIFTS},
    **{f"salient-{percent}": partial(_shared, percent) for percent in SALIENT_PERCENT},
}
