"""Budgets equal the method's tables, on any grid and any depth."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkprune.contract.budgets import (
    FAMILIES,
    OPTIONS,
    Budget,
    Counts,
    Share,
    one_stage,
    parse_budget,
    prune_layers,
    scaled_layers,
)
from sinkprune.contract.errors import BudgetError
from support.references import reference

LLAVA_576 = {
    "retain-192": Counts(6, 1, 192, 192, (345, 195, 138)),
    "retain-128": Counts(6, 1, 128, 128, (230, 130, 92)),
    "retain-64": Counts(6, 1, 64, 64, (110, 74, 42)),
    "retain-32": Counts(6, 1, 32, 32, (54, 36, 22)),
}
PER_MILLE = {
    "prune-66.7": Counts(10, 1, 450, 50, (400, 350, 250)),
    "prune-77.8": Counts(10, 1, 450, 50, (300, 200, 120)),
    "prune-80": Counts(10, 1, 400, 50, (300, 200, 120)),
    "prune-88.9": Counts(10, 1, 200, 50, (180, 110, 60)),
}


def test_the_tables_hold_what_the_method_says() -> None:
    assert {name: budget.resolve(576) for name, budget in FAMILIES["llava"].budgets.items()} == LLAVA_576
    of_five_tiles = {name: budget.resolve(576, 5) for name, budget in FAMILIES["llava-next"].budgets.items()}
    assert of_five_tiles == {
        "retain-320": Counts(6, 1, 64, 64, (550, 370, 210)),
        "retain-160": Counts(6, 1, 32, 32, (270, 180, 110)),
    }
    for family in ("qwen2-vl", "qwen2.5-vl", "qwen3-vl"):
        assert {name: budget.resolve(1000) for name, budget in FAMILIES[family].budgets.items()} == PER_MILLE


def test_reserve_is_clipped_first_and_diverse_to_what_is_left() -> None:
    greedy = Budget(Share(900, 1000), Share(900, 1000), ())
    assert greedy.resolve(100) == Counts(1, 1, 90, 9, ())
    all_reserve = Budget(Share(1, 1), Share(1, 1), ())
    assert all_reserve.resolve(100) == Counts(1, 1, 99, 0, ())


def test_options_that_change_no_counts_change_what_they_name() -> None:
    """The references of pruned answers read budgets with the same options, so they do not find these."""
    plain = parse_budget("llava", "retain-64")
    for option, field, value in (
        ("raster", "order", "raster"),
        ("visual-keys", "scores_over", "visual_keys"),
        ("compact", "positions", "compact"),
        ("per-frame", "frames", "apart"),
        ("tower", "tower", "merging"),
        ("bars", "tower", "bars"),
        ("action-rows", "queries", "actions"),
    ):
        assert vars(parse_budget("llava", f"retain-64+{option}")) == {**vars(plain), field: value}


@pytest.mark.parametrize(
    ("name", "tokens", "counts"),
    [
        ("retain-64", 480, Counts(5, 1, 53, 53, (91, 61, 35))),
        ("retain-64", 1, Counts(1, 1, 0, 0, (1, 1, 1))),
        ("retain-64+drop-sink", 576, Counts(6, 0, 64, 64, (110, 74, 42))),
        ("retain-64+keep-outliers", 576, Counts(0, 0, 64, 64, (110, 74, 42))),
        ("retain-64+no-diversity", 576, Counts(6, 1, 64, 0, (110, 74, 42))),
        ("retain-64+no-sanitizer", 576, Counts(0, 0, 576, 0, (110, 74, 42))),
        ("retain-64+rho-999", 576, Counts(576, 1, 0, 0, (110, 74, 42))),
        ("retain-64+raster+compact+visual-keys", 576, LLAVA_576["retain-64"]),
        ("retain-64+from-retain-192+no-diversity", 576, Counts(6, 1, 192, 0, (110, 74, 42))),
    ],
)
def test_names_resolve_to_counts(name: str, tokens: int, counts: Counts) -> None:
    assert parse_budget("llava", name).resolve(tokens) == counts
    assert counts.kept == counts.sink + counts.reserve + counts.diverse
    first, *options = name.split("+")
    assert parse_budget("llava", "+".join([first, *reversed(options)])).resolve(tokens) == counts


def test_an_unknown_option_is_refused_with_the_known_names() -> None:
    for option in ("compacted", "", "Raster", "retain-32", "rho-0", "rho-1000", "rho-05", "from-retain-65", "from-"):
        with pytest.raises(BudgetError) as caught:
            parse_budget("llava", f"retain-64+raster+{option}")
        for known in [f"unknown option '{option}'", f"'retain-64+raster+{option}'", *OPTIONS, "rho-N: N per mille"]:
            assert known in str(caught.value)
    with pytest.raises(BudgetError, match=r"did you mean 'raster'\?"):
        parse_budget("llava", "retain-64+rastr")


def test_prune_layers_of_any_depth_ascend_and_leave_a_layer_behind_them() -> None:
    for depth in range(4, 100):
        first, second, third = prune_layers(depth)
        assert 0 <= first < second < third < depth - 1
        assert depth < 28 or (first, second, third) == (2, 6, 15)
    for depth in range(4):
        with pytest.raises(BudgetError, match=f"{depth} layers is too shallow.*at least 4 layers"):
            prune_layers(depth)
    # The last stage would follow the last layer.
    with pytest.raises(BudgetError, match="after layers 1, 2, 3"):
        scaled_layers((8, 16, 24), 4)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.integers(4, 60),
    st.integers(1, 3000),
    st.sampled_from(
        ["retain-192", "retain-32", "retain-192+from-retain-32", "retain-64+no-sanitizer", "retain-128+no-diversity"]
    ),
)
def test_one_stage_keeps_the_mean_of_three(num_layers: int, tokens: int, name: str) -> None:
    budget = parse_budget("llava", name)
    kept = one_stage(budget, tokens, num_layers)
    assert kept.resolve(tokens).stages == tuple(reference.one_stage(budget, tokens, num_layers).values())
    assert replace(kept, stages=budget.stages) == budget
    none = replace(budget, stages=())
    assert one_stage(none, tokens, num_layers) == none
