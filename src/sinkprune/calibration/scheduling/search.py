"""Exhaustive search on a grid of sizes for the budget that drops the least attention at a price."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from sinkprune.contract.costs.model import Costs, later_tokens
from sinkprune.contract.precision import Array

MOST_STAGES = 3
"""The stages of the method."""

Price = Callable[[int, Array, tuple[int, ...]], Array]
"""Returns the prices [n] of plans. Arguments: the sanitizer's number, the visual rows [n,S] that reach each segment,
and the numbers of the segments that a stage follows."""


@dataclass(frozen=True)
class LatencyPrice:
    """The time of a request to its last token: `sinkprune.contract.costs.model.predict` for many plans."""

    costs: Costs
    layers: tuple[int, ...]
    """The decoder layers of each segment."""
    text: int
    """Text tokens of the prompt."""
    tokens: int
    """Visual tokens of the picture."""
    projector: bool
    """Whether the model has a projector."""
    new_tokens: int

    def __call__(self, sanitizer: int, rows: Array, stages: tuple[int, ...]) -> Array:
        costs, all_rows = self.costs, self.text + rows
        total = costs.tower.ms(self.tokens) + costs.rest + costs.sanitizer.ms(rows[:, 0])
        if self.projector:
            total = total + costs.projector.ms(rows[:, 0])
        for segment, curve in enumerate(costs.decoders):
            total = total + curve.ms(all_rows[:, segment])
        for stage in stages:
            total = total + costs.select.ms(all_rows[:, stage])
        mean = all_rows @ np.array(self.layers) / sum(self.layers)
        return total + later_tokens(costs.token_start, self.new_tokens - 1) * costs.token.ms(mean)


@dataclass(frozen=True)
class MeanTokensPrice:
    """Visual tokens a decoder layer runs on, mean over layers."""

    layers: tuple[int, ...]
    """The decoder layers of each segment."""

    def __call__(self, sanitizer: int, rows: Array, stages: tuple[int, ...]) -> Array:
        return rows @ np.array(self.layers) / sum(self.layers)


@dataclass(frozen=True)
class PlanSpace:
    """The plans to choose from: A sanitizers, and stages of M sizes after some of the C = S - 1 first segments."""

    layers: tuple[int, ...]
    """[S]: the decoder layers of each segment."""
    kept: Array
    """[A]: visual rows that each sanitizer keeps."""
    sizes: Array
    """[M], ascending: visual rows that a stage may keep."""
    lost_before: Array
    """[A,S]: the share of a segment's text-visual attention on tokens that the sanitizer dropped."""
    lost_after: Array
    """[A,C,S,M]: the same on all dropped tokens, if the last stage before the segment has that place and size."""


class FoundPlan(NamedTuple):
    """A plan of the space."""

    sanitizer: int
    """Its number in the space."""
    stages: tuple[int, ...]
    """The numbers of the segments that its stages follow."""
    sizes: tuple[int, ...]
    """The numbers of its stages' sizes."""
    price: float
    lost: float
    """The share of text-visual attention that it drops, mean over layers."""


def best_of_each_sanitizer(space: PlanSpace, price: Price, limit: float) -> list[FoundPlan]:
    """Return the plan of each sanitizer with the least loss at a price of at most `limit`, the least loss first.

    Of equal losses the cheaper comes first. A sanitizer without such a plan is left out.
    """
    found = [_best(space, price, limit, sanitizer) for sanitizer in range(len(space.kept))]
    return sorted(filter(None, found), key=lambda plan: (plan.lost, plan.price))


def cheapest(space: PlanSpace, price: Price) -> FoundPlan:
    """Return the plan of the space with the least price; of equal prices the one with the least loss."""
    found = []
    for sanitizer in range(len(space.kept)):
        for stages, chosen, rows in _plans(space, sanitizer):
            prices = price(sanitizer, rows, stages)
            found.append(_plan(sanitizer, stages, chosen, prices, _lost(space, sanitizer, stages, chosen), prices))
    return min(found, key=lambda plan: (plan.price, plan.lost))


def _best(space: PlanSpace, price: Price, limit: float, sanitizer: int) -> FoundPlan | None:
    best = None
    for stages, chosen, rows in _plans(space, sanitizer):
        prices = price(sanitizer, rows, stages)
        lost = np.where(prices <= limit, _lost(space, sanitizer, stages, chosen), np.inf)
        plan = _plan(sanitizer, stages, chosen, prices, lost, lost)
        if np.isfinite(plan.lost) and (best is None or (plan.lost, plan.price) < (best.lost, best.price)):
            best = plan
    return best


def _plan(
    sanitizer: int, stages: tuple[int, ...], chosen: Array, prices: Array, lost: Array, least: Array
) -> FoundPlan:
    """Return the one of n plans with the `least` value; of equal values the cheaper, then the one of less loss."""
    place = int(np.lexsort((lost, prices, least))[0])
    return FoundPlan(sanitizer, stages, tuple(chosen[place].tolist()), float(prices[place]), float(lost[place]))


def _plans(space: PlanSpace, sanitizer: int) -> Iterator[tuple[tuple[int, ...], Array, Array]]:
    """Yield each choice of stages, its descending sizes' numbers [n,stages], and the segments' rows [n,S]."""
    segments, kept = len(space.layers), int(space.kept[sanitizer])
    smaller = range(int(np.searchsorted(space.sizes, kept)))
    for count in range(min(MOST_STAGES, segments - 1) + 1):
        choices = [*combinations(reversed(smaller), count)]
        chosen = np.array(choices, np.int64).reshape(len(choices), count)
        for stages in combinations(range(segments - 1), count) if choices else ():
            rows = np.full((len(chosen), segments), kept)
            for number, stage in enumerate(stages):
                rows[:, stage + 1 :] = space.sizes[chosen[:, number], None]
            yield stages, chosen, rows


def _lost(space: PlanSpace, sanitizer: int, stages: tuple[int, ...], chosen: Array) -> Array:
    """Return [n]: the attention that plans lose, mean over layers."""
    total, last = np.zeros(len(chosen)), None
    for segment, layers in enumerate(space.layers):
        if last is None:
            total += layers * space.lost_before[sanitizer, segment]
        else:
            total += layers * space.lost_after[sanitizer, stages[last], segment, chosen[:, last]]
        if segment in stages:
            last = stages.index(segment)
    return total / sum(space.layers)
