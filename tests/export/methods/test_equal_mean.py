"""Every method's plan has the mean visual tokens per layer of SinkPruner's, or is unreachable."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkprune.contract.budgets import FAMILIES, Counts, parse_budget, prune_layers, scaled_layers
from sinkprune.contract.errors import BudgetError
from sinkprune.contract.schedule import PictureSchedule
from sinkprune.export.dialects import opset24
from sinkprune.export.methods import METHODS as ALL_METHODS
from sinkprune.export.methods.vscan import third_after
from sinkprune.export.pruning.equal_mean import mean_tokens, scaled_stages, tokens_into_llm
from sinkprune.export.pruning.plan import PlanFacts, UnreachableBudget
from sinkprune.export.weights import PRECISIONS
from support.models import graphs
from support.programs.slow_cases import every
from support.references.reference_methods import CANNOT_REACH_ALL

MODELS = {
    (32, 576): (*FAMILIES["llava"].budgets, "retain-64+no-sanitizer", "retain-64+drop-sink"),
    (22, 576): ("retain-192", "retain-64"),
    (8, 64): ("retain-192", "retain-64"),
}
"""Decoder layers and visual tokens, and the budgets to try there."""
MEANS = {"retain-192": 203.1, "retain-128": 135.4, "retain-64": 67.7, "retain-32": 34.0}


def facts(num_layers: int = 32, visual_tokens: int = 576) -> PlanFacts:
    model = replace(graphs.language_model(), num_layers=num_layers)
    return PlanFacts(model, visual_tokens, 8, PRECISIONS["fp32"], opset24)


@pytest.mark.parametrize(
    ("method", "num_layers", "visual_tokens"),
    every(2, ((method, *model) for method in ALL_METHODS for model in MODELS)),
)
def test_means_are_equal_to_half_a_token(method: str, num_layers: int, visual_tokens: int) -> None:
    build, model, reached = ALL_METHODS[method], facts(num_layers, visual_tokens), 0
    for name in MODELS[num_layers, visual_tokens]:
        budget = parse_budget("llava", name)
        wanted = mean_tokens(budget.resolve(visual_tokens), prune_layers(num_layers), num_layers)
        try:
            plan = build(model, budget)
        except UnreachableBudget as error:
            assert method in CANNOT_REACH_ALL
            assert f"the budget's is {float(wanted):.1f}" in str(error)
            continue
        reached += 1
        realised = PictureSchedule.of(plan.kept.resolve(visual_tokens), 1, [*plan.select_after]).mean(num_layers)
        assert abs(realised - wanted) <= Fraction(1, 2), name
        if name in MEANS and (num_layers, visual_tokens) == (32, 576):
            assert float(wanted) == pytest.approx(MEANS[name], abs=0.05)
    assert reached >= 1
    assert method in CANNOT_REACH_ALL or reached == len(MODELS[num_layers, visual_tokens])


@pytest.mark.parametrize(
    ("method", "budget", "kept", "stages"),
    [
        ("uniform", "retain-128", 135, ()),
        ("uniform", "retain-64", 68, ()),
        # (135.4 * 32 - 3 * 576) / 29 and (67.7 * 32 - 3 * 576) / 29
        ("fastv", "retain-128", 576, (90,)),
        ("fastv", "retain-64", 576, (15,)),
        ("sparsevlm", "retain-64", 576, (27, 18, 10)),
        ("vscan", "retain-64", 98, (33,)),
        ("tops", "retain-64", 109, (54, 14)),
    ],
)
def test_schedules_of_llava_7b(method: str, budget: str, kept: int, stages: tuple[int, ...]) -> None:
    counts = ALL_METHODS[method](facts(), parse_budget("llava", budget)).kept.resolve(576)
    assert (counts.kept, counts.stages) == (kept, stages)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(4, 60), st.integers(20, 3000), st.sampled_from(sorted(FAMILIES["llava"].budgets)))
def test_nearest_schedules_on_any_model(num_layers: int, visual_tokens: int, name: str) -> None:
    model, budget = facts(num_layers, visual_tokens), parse_budget("llava", name)
    cuts = prune_layers(num_layers)
    own = budget.resolve(visual_tokens)
    wanted = mean_tokens(own, cuts, num_layers)
    before = tokens_into_llm(model, budget)
    assert abs(before - wanted) <= Fraction(1, 2)
    (half_way,) = scaled_layers((16,), num_layers)
    into, third = third_after(model, budget, half_way)
    assert 1 <= third <= into <= visual_tokens
    assert abs(mean_tokens(Counts(0, 0, into, 0, (third,)), [half_way], num_layers) - wanted) <= Fraction(1, 2)
    if wanted >= mean_tokens(Counts(0, 0, visual_tokens, 0, (1, 1, 1)), cuts, num_layers):
        schedule = scaled_stages(model, budget, cuts, own.stages).resolve(visual_tokens)
        assert abs(mean_tokens(schedule, cuts, num_layers) - wanted) <= Fraction(1, 2)
        assert list(schedule.stages) == sorted(schedule.stages, reverse=True)
        assert schedule.stages[-1] >= 1


def test_ablations_take_out_one_part_each() -> None:
    budget = parse_budget("llava", "retain-64")
    plans = {part: ALL_METHODS[f"sinkpruner-{part}"](facts(), budget) for part in _PARTS}
    assert {part: plan.kept.resolve(576) for part, plan in plans.items()} == _PARTS
    assert {part for part, plan in plans.items() if plan.sanitizer is None} == {"no-sanitizer"}
    assert {part for part, plan in plans.items() if not plan.select_after} == {"no-text-pruner"}


_PARTS = {
    "no-sanitizer": Counts(0, 0, 576, 0, (15,)),
    "no-text-pruner": Counts(6, 1, 34, 33, ()),
    "no-diversity": Counts(6, 1, 128, 0, (61,)),
    "no-outlier-removal": Counts(0, 0, 65, 64, (61,)),
    "no-aggregation": Counts(6, 0, 65, 64, (61,)),
}
"""Counts of each ablation of retain-64 on LLaVA-1.5-7B."""


def test_a_stage_behind_the_last_layer_is_rejected() -> None:
    with pytest.raises(BudgetError, match=r"6 layers is too shallow.*8, 16, 24 of 32.*2, 3, 5.*at least 7 layers"):
        scaled_layers((8, 16, 24), 6)
    assert scaled_layers((8, 16, 24), 7) == (2, 4, 5)
