"""The search for the budget that drops least attention at a price: all that a grid of sizes allows are looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from sinkprune.contract.precision import Array

MOST_STAGES = 3
"""As many as the method has."""

Price = Callable[[int, Array, tuple[int, ...]], Array]
"""What plans cost [n], given the sanitizer's number, the visual rows [n,S] that reach each segment, and the numbers
of the segments that a stage follows."""


@dataclass(frozen=True)
class Space:
    """What may be chosen: one of A sanitizers, and stages of M sizes behind some of the C segments that another of
    the S follows."""

    layers: tuple[int, ...]
    """[S]: the decoder layers of each segment."""
    kept: Array
    """[A]: visual rows that each sanitizer sends to the LLM."""
    sizes: Array
    """[M], ascending: visual rows that a stage may leave."""
    lost_before: Array
    """[A,S]: the share of a segment's text-visual attention that falls on tokens that are gone, before any stage."""
    lost_after: Array
    """[A,C,S,M]: the same behind a stage of that size, if it was the last before the segment."""


class Found(NamedTuple):
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


def best_of_each_sanitizer(space: Space, price: Price, limit: float) -> list[Found]:
    """The plan of each sanitizer that loses least of those that cost at most `limit`, the least loss first.

    Of equal loss the cheaper comes first. A sanitizer without such a plan is left out.
    """
    found = [_best(space, price, limit, sanitizer) for sanitizer in range(len(space.kept))]
    return sorted(filter(None, found), key=lambda plan: (plan.lost, plan.price))


def cheapest(space: Space, price: Price) -> float:
    """The least price of any plan of the space."""
    return min(
        float(price(sanitizer, rows, stages).min())
        for sanitizer in range(len(space.kept))
        for stages, _, rows in _plans(space, sanitizer)
    )


def _best(space: Space, price: Price, limit: float, sanitizer: int) -> Found | None:
    best = None
    for stages, chosen, rows in _plans(space, sanitizer):
        prices = price(sanitizer, rows, stages)
        lost = np.where(prices <= limit, _lost(space, sanitizer, stages, chosen), np.inf)
        place = int(np.lexsort((prices, lost))[0])
        plan = Found(sanitizer, stages, tuple(chosen[place].tolist()), float(prices[place]), float(lost[place]))
        if np.isfinite(plan.lost) and (best is None or (plan.lost, plan.price) < (best.lost, best.price)):
            best = plan
    return best


def _plans(space: Space, sanitizer: int) -> Iterator[tuple[tuple[int, ...], Array, Array]]:
    """Of each choice of stages: the numbers of sizes [n,stages] that get smaller from stage to stage, and the rows
    [n,S] that they leave to each segment."""
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


def _lost(space: Space, sanitizer: int, stages: tuple[int, ...], chosen: Array) -> Array:
    """[n]: the attention that plans lose, mean over layers."""
    total, last = np.zeros(len(chosen)), None
    for segment, layers in enumerate(space.layers):
        if last is None:
            total += layers * space.lost_before[sanitizer, segment]
        else:
            total += layers * space.lost_after[sanitizer, stages[last], segment, chosen[:, last]]
        if segment in stages:
            last = stages.index(segment)
    return total / sum(space.layers)
