"""The attention that budgets drop: measured beside what stages keep, summed beside plain loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise, product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.calibration.plans import (
    TRIAL,
    PlanSpace,
    Trials,
    best_of_each_sanitizer,
    latency_price,
    mean_tokens_price,
)
from sinkprune.calibration.schedule_search import (
    PictureAttention,
    dropped_attention,
    measure_attention,
    sanitizers,
    sizes,
)
from sinkprune.contract.budgets import Budget, Share
from sinkprune.contract.bundle import read_bundle
from sinkprune.deadlines.costs import Costs, Curve, Place

Bundles = Callable[..., Path]
QUESTION = "What is in the picture?"


@pytest.mark.parametrize(("name", "stage"), [("gqa-112", Share(9, 64)), ("qwen", Share(200, 1000))])
def test_a_stage_keeps_what_the_text_attends_to_most(
    name: str, stage: Share, bundle: Bundles, tmp_path: Path, photo: Image.Image
) -> None:
    trials = Trials(read_bundle(bundle(name)), tmp_path)
    pipeline, cuts = Pipeline.load(trials.bundle), trials.bundle.manifest.cut_after
    every = Budget(Share(1, 1), Share(0, 1), (stage,), sanitizer=False)
    some = Budget(Share(1, 5), Share(1, 5), ())
    for number, cut in enumerate(cuts):
        trials.add(f"after {number}", every, (cut,))
    trials.add("some", some, ())
    found = measure_attention(pipeline, photo, QUESTION, ["some"])
    for number, cut in enumerate(cuts):
        answer = pipeline.generate(photo, QUESTION, method=TRIAL, budget=f"after {number}", max_new_tokens=1)
        kept = answer.kept.after_stage[cut]
        best = np.sort(np.argsort(-found.received[number], kind="stable")[: stage.of(found.received.shape[1])])
        assert kept.tolist() == best.tolist()
    answer = pipeline.generate(photo, QUESTION, method=TRIAL, budget="some", max_new_tokens=1)
    assert found.kept[0].tolist() == answer.kept.index.ravel().tolist()


def test_what_is_lost_beside_plain_loops() -> None:
    random = np.random.default_rng(3)
    attended = [
        PictureAttention(random.uniform(0, 1, (2, tokens)), [random.permutation(tokens)[:kept] for kept in (5, 12)])
        for tokens in (20, 30)
    ]
    stages, seen = [Share(1, 10), Share(1, 3)], [0, 1, 1]
    before, after = dropped_attention(attended, stages)
    assert before.shape == (2, 3) and after.shape == (2, 2, 3, 2)
    for sanitizer, segment in np.ndindex(2, 3):
        gone = []
        for one in attended:
            own = one.received[seen[segment]]
            gone.append(1 - sum(own[token] for token in one.kept[sanitizer]) / sum(own))
        assert before[sanitizer, segment] == pytest.approx(np.mean(gone))
        for select, size in np.ndindex(2, 2):
            gone = []
            for one in attended:
                own, ranks = one.received[seen[segment]], one.received[select]
                best = sorted(one.kept[sanitizer], key=lambda token: -ranks[token])
                count = stages[size].numerator * len(own) // stages[size].denominator
                gone.append(1 - sum(own[token] for token in best[:count]) / sum(own))
            assert after[sanitizer, select, segment, size] == pytest.approx(np.mean(gone))


@pytest.mark.parametrize("name", ["gqa-112", "qwen", "next"])
def test_the_grid_holds_what_the_familys_budgets_keep(name: str, bundle: Bundles) -> None:
    manifest = read_bundle(bundle(name)).manifest
    kept = {(each.reserve, each.diverse) for each in sanitizers(manifest)}
    whole = sizes(manifest)[0].denominator
    counts = [size.numerator for size in sizes(manifest)]
    assert counts == sorted(set(counts)) and counts[0] >= 1
    for budget in manifest.budgets.values():
        assert (budget.reserve, budget.diverse) in kept
        assert {stage.of(whole) for stage in budget.stages} <= {*counts}
    for each in sanitizers(manifest):
        found = each.resolve(manifest.most_visual_tokens)
        assert found.reserve >= 1 and found.diverse >= 1 and found.kept <= manifest.most_visual_tokens
    # As many salient ones and as many diverse ones are the same plan, whatever its fractions.
    same = [(each.reserve.of(whole), each.diverse.of(whole)) for each in sanitizers(manifest)]
    assert len(same) == len({*same}) > 10


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
    segments = tuple(curve() for _ in range(4))
    return Costs(1, curve(), curve(), curve(), segments, curve(), 1.5, curve(), (), 0.0, 10**6, place=place)


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
        for stages, chosen in product(combinations(range(3), count), product(range(len(within.sizes)), repeat=count)):
            left = [within.kept[sanitizer], *(within.sizes[size] for size in chosen)]
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
                    else within.lost_after[sanitizer, stages[last], segment, chosen[last]]
                )
                lost += layers * share / 10
            plans.append((sanitizer, stages, chosen, rows, lost))
    return plans


@pytest.mark.parametrize(("seed", "new"), [(0, 1), (1, 5), (2, 5)])
def test_the_best_plan_at_a_price_is_found(seed: int, new: int) -> None:
    within, found = space(seed), costs(seed)
    price = latency_price(found, within.layers, text=TEXT, tokens=64, projector=True, new_tokens=new)
    plans = [
        (price_by_hand(found, rows, stages, 64, new), lost, sanitizer, stages, sizes)
        for sanitizer, stages, sizes, rows, lost in all_plans(within)
    ]
    prices = sorted(plan[0] for plan in plans)
    least = best_of_each_sanitizer(within, price, by=("price", "lost"))[0]
    assert least.price == pytest.approx(prices[0])
    assert (least.sanitizer, least.stages, least.sizes) in [plan[2:] for plan in plans if plan[0] < prices[0] + 1e-9]
    for limit in (prices[0] + 1e-9, *np.quantile(prices, [0.2, 0.5, 0.8]), prices[-1] + 1):
        best = min((lost, cost) for cost, lost, *_ in plans if cost <= limit)
        first = best_of_each_sanitizer(within, price, limit)[0]
        assert (first.lost, first.price) == pytest.approx(best)
        assert (first.sanitizer, first.stages, first.sizes) in [plan[2:] for plan in plans]
    assert best_of_each_sanitizer(within, price, prices[0] - 1e-6) == []


def test_of_equal_loss_the_cheaper_is_taken() -> None:
    within = space(1)
    nothing = replace(within, lost_before=0 * within.lost_before, lost_after=0 * within.lost_after)
    price = mean_tokens_price(within.layers)
    cheapest = best_of_each_sanitizer(nothing, price, by=("price", "lost"))[0]
    assert best_of_each_sanitizer(nothing, price)[0].price == cheapest.price
