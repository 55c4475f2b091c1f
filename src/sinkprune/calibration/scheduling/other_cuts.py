"""The best budgets of bundles with more cuts: those after the layers where other methods drop tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace

from sinkprune.calibration.scheduling.attention import Measurements, plan_space
from sinkprune.calibration.scheduling.named_budget import METHOD
from sinkprune.calibration.scheduling.report import OtherCuts
from sinkprune.calibration.scheduling.search import LatencyPrice, MeanTokensPrice, Price, best_of_each_sanitizer
from sinkprune.calibration.scheduling.trials import TRIAL
from sinkprune.contract.errors import BudgetError
from sinkprune.contract.families import FAMILIES
from sinkprune.contract.manifest import Manifest, decoder_segments
from sinkprune.export.methods import METHODS
from sinkprune.export.pruning.plan import Method, PlanFacts

IN_LLM = ("fastv", "pyramiddrop", "sparsevlm")
"""The methods whose layers are tried."""


def other_cuts(
    manifest: Manifest,
    facts: PlanFacts,
    measurements: Measurements,
    price: LatencyPrice | MeanTokensPrice,
    limit: float,
) -> Iterable[OtherCuts]:
    """Yield the best budget of at most `limit` with the cuts of each method that the bundle lacks."""
    own, layers = manifest.cut_after, manifest.language_model.num_layers
    for method in IN_LLM:
        build = METHODS[method]
        cuts = tuple(sorted({*own, *_cuts_of(build, manifest, facts)}))
        if cuts == own:
            continue
        best = best_of_each_sanitizer(plan_space(measurements, cuts, layers), _recut(price, own, cuts, layers), limit)
        if best:
            methods = tuple(name for name in dict.fromkeys([METHOD, *manifest.plans, method]) if name != TRIAL)
            stages = tuple(cuts[stage] for stage in best[0].stages)
            yield OtherCuts(methods, cuts, stages, best[0].lost)


def _cuts_of(build: Method, manifest: Manifest, facts: PlanFacts) -> list[int]:
    """Return the layers after which a method drops tokens; none if it cannot be built for the model."""
    for budget in FAMILIES[manifest.family].budgets.values():
        try:
            return [*build(facts, budget).select_after]
        except BudgetError:
            continue
    return []


def _recut(
    price: LatencyPrice | MeanTokensPrice, own: tuple[int, ...], cuts: tuple[int, ...], num_layers: int
) -> Price:
    """Return the prices of plans with other cuts; every layer of a segment costs the same share of it."""
    segments = decoder_segments(cuts, num_layers)
    layers = tuple(map(len, segments))
    if isinstance(price, MeanTokensPrice):
        return MeanTokensPrice(layers)
    whole = decoder_segments(own, num_layers)
    decoders = []
    for segment in segments:
        number = bisect_left(own, segment[-1])
        decoders.append(price.costs.decoders[number].slower(len(segment) / len(whole[number])))
    return replace(price, costs=replace(price.costs, decoders=tuple(decoders)), layers=layers)
