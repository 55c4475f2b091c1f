"""The search for budgets, beside a plain walk over all plans there are."""

from __future__ import annotations

from itertools import combinations, pairwise, product
from types import SimpleNamespace

import numpy as np
import pytest

from sinkprune.calibration.scheduling import propose as grid
from sinkprune.calibration.scheduling.search import (
    FoundPlan,
    LatencyPrice,
    MeanTokensPrice,
    PlanSpace,
    best_of_each_sanitizer,
    cheapest,
)
from sinkprune.deadlines.costs import Costs, Curve, Place

TEXT = 9


def space(seed: int) -> PlanSpace:
    random = np.random.default_rng(seed)
    sanitizers, segments, sizes = 3, 4, 5
    lost = np.sort(random.uniform(0, 1, (sanitizers, segments - 1, segments, sizes)))[..., ::-1]
    return PlanSpace(
        layers=(2, 1, 3, 4),
        kept=np.array([12, 30, 50]),
        sizes=np.array([2, 5, 10, 20, 40]),
        lost_before=random.uniform(0, 0.5, (sanitizers, segments)),
        lost_after=lost,
    )


def costs(seed: int) -> Costs:
    random = np.random.default_rng(seed)

    def curve() -> Curve:
        return Curve(*random.uniform(0, (2, 0.2, 0.002)))

    place = Place("", (1, 2, 5), "fp32", "fp32", "ort-cpu", "fp32", 1, "")
    return Costs(
        1, place, curve(), curve(), curve(), tuple(curve() for _ in range(4)), curve(), 1.5, curve(), (), 0.0, 10**6
    )


def price_by_hand(found: Costs, rows: list[int], stages: tuple[int, ...], tokens: int, new: int) -> float:
    """Milliseconds of a plan that leaves so many visual `rows` to each of four segments."""
    total = found.tower.ms(tokens) + found.sanitizer.ms(rows[0]) + found.projector.ms(rows[0]) + found.rest
    for segment, curve in enumerate(found.decoders):
        total += curve.ms(TEXT + rows[segment])
        if segment in stages:
            total += found.select.ms(TEXT + rows[segment])
    mean = sum(layers * (TEXT + count) for layers, count in zip((2, 1, 3, 4), rows, strict=True)) / 10
    return float(total + (new - 1) * found.token.ms(mean))


def all_plans(within: PlanSpace) -> list[tuple[int, tuple[int, ...], tuple[int, ...], list[int], float]]:
    """Sanitizer, stages, sizes, rows of each segment and loss of every plan."""
    plans = []
    for sanitizer, count in product(range(len(within.kept)), range(4)):
        for stages, sizes in product(combinations(range(3), count), product(range(len(within.sizes)), repeat=count)):
            left = [within.kept[sanitizer], *(within.sizes[size] for size in sizes)]
            if any(later >= earlier for earlier, later in pairwise(left)):
                continue
            rows, lost, last = [], 0.0, None
            for segment, layers in enumerate(within.layers):
                done = [number for number, stage in enumerate(stages) if stage < segment]
                last = done[-1] if done else None
                rows.append(int(left[0] if last is None else left[last + 1]))
                share = (
                    within.lost_before[sanitizer, segment]
                    if last is None
                    else within.lost_after[sanitizer, stages[last], segment, sizes[last]]
                )
                lost += layers * share / 10
            plans.append((sanitizer, stages, sizes, rows, lost))
    return plans


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("new", [1, 5])
def test_the_best_plan_at_a_price_is_found(seed: int, new: int) -> None:
    within, found = space(seed), costs(seed)
    price = LatencyPrice(found, within.layers, TEXT, 64, True, new)
    plans = [(price_by_hand(found, rows, stages, 64, new), lost, sanitizer, stages, sizes)
             for sanitizer, stages, sizes, rows, lost in all_plans(within)]  # fmt: skip
    prices = sorted(plan[0] for plan in plans)
    least = cheapest(within, price)
    assert least.price == pytest.approx(prices[0])
    assert (least.sanitizer, least.stages, least.sizes) in [plan[2:] for plan in plans if plan[0] < prices[0] + 1e-9]
    for limit in (prices[0] + 1e-9, *np.quantile(prices, [0.2, 0.5, 0.8]), prices[-1] + 1):
        best = min((lost, cost) for cost, lost, *_ in plans if cost <= limit)
        first = best_of_each_sanitizer(within, price, limit)[0]
        assert (first.lost, first.price) == pytest.approx(best)
        assert (first.sanitizer, first.stages, first.sizes) in [plan[2:] for plan in plans]
    assert best_of_each_sanitizer(within, price, prices[0] - 1e-6) == []


def test_each_sanitizer_has_its_own_best() -> None:
    within = space(3)
    price = MeanTokensPrice(within.layers)
    plans = [
        (rows @ np.array(within.layers) / 10, lost, sanitizer) for sanitizer, _, _, rows, lost in all_plans(within)
    ]
    found = best_of_each_sanitizer(within, price, 8.0)
    assert [plan.lost for plan in found] == sorted(plan.lost for plan in found)
    for plan in found:
        best = min((lost, cost) for cost, lost, sanitizer in plans if cost <= 8.0 and sanitizer == plan.sanitizer)
        assert (plan.lost, plan.price) == pytest.approx(best)
    assert sorted(plan.sanitizer for plan in found) == sorted({each for cost, _, each in plans if cost <= 8.0})


def test_of_equal_loss_the_cheaper_is_taken() -> None:
    within = space(1)
    nothing = PlanSpace(within.layers, within.kept, within.sizes, 0 * within.lost_before, 0 * within.lost_after)
    price = MeanTokensPrice(within.layers)
    found: FoundPlan = best_of_each_sanitizer(nothing, price, 1000.0)[0]
    assert found.price == cheapest(nothing, price).price


@pytest.mark.parametrize("tokens", [256, 576])
def test_no_two_sanitizers_keep_as_many_tokens(tokens: int) -> None:
    """As many salient ones and as many diverse ones are the same plan, whatever its fractions."""
    manifest = SimpleNamespace(any_resolution=False, most_visual_tokens=tokens, family="llava")
    counts = [(each.reserve.of(tokens), each.diverse.of(tokens)) for each in grid.sanitizers(manifest)]  # type: ignore[arg-type]
    assert len(counts) == len({*counts}) > 15
