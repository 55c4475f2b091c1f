"""Budgets are the numbers of the method's tables, on any grid and any depth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinkprune.contract.budgets import OPTIONS, Budget, Counts, Share, prune_layers
from sinkprune.contract.errors import BudgetError
from sinkprune.contract.families import FAMILIES, parse_budget

LLAVA_576 = {
    "retain-192": Counts(6, 1, 192, 192, (345, 195, 138)),
    "retain-128": Counts(6, 1, 128, 128, (230, 130, 92)),
    "retain-64": Counts(6, 1, 64, 64, (110, 74, 42)),
    "retain-32": Counts(6, 1, 32, 32, (54, 36, 22)),
}


def test_shares_are_exact_integers() -> None:
    assert Share(350, 1000).of(180) == 63
    assert int(0.35 * 180) == 62
    assert Share(64, 576).of(576) == 64
    assert Share(64, 576).of(575) == 63


def test_a_share_is_at_least_one_unless_it_is_zero() -> None:
    assert Share(50, 1000).of(3) == 1
    assert Share(1, 576).of(1) == 1
    assert Share(0, 1).of(576) == 0


@given(numerator=st.integers(1, 10**6), denominator=st.integers(1, 10**6), tokens=st.integers(1, 10**6))
def test_a_share_is_the_floor_or_one(numerator: int, denominator: int, tokens: int) -> None:
    share = Share(numerator, denominator).of(tokens)
    assert share == 1 or share * denominator <= tokens * numerator < (share + 1) * denominator


def test_the_llava_table_holds_what_the_method_says() -> None:
    assert {name: budget.resolve(576) for name, budget in FAMILIES["llava"].budgets.items()} == LLAVA_576


def test_retain_64_keeps_129_tokens_with_the_sink() -> None:
    counts = parse_budget("llava", "retain-64").resolve(576)
    assert counts.kept == 129
    assert counts.stages == (110, 74, 42)
    assert counts.outliers == 6


@pytest.mark.parametrize("name", LLAVA_576)
@pytest.mark.parametrize("tokens", [1, 2, 4, 16, 49, 64, 144, 256, 480, 575, 576, 577, 729, 1024, 2880])
def test_other_grids_scale_every_count(name: str, tokens: int) -> None:
    row, counts = LLAVA_576[name], FAMILIES["llava"].budgets[name].resolve(tokens)
    low = tokens - counts.outliers
    assert counts.outliers == max(1, -(-tokens // 100))
    assert counts.stages == tuple(max(1, stage * tokens // 576) for stage in row.stages)
    assert counts.reserve == min(low, max(1, row.reserve * tokens // 576))
    assert counts.diverse == min(low - counts.reserve, max(1, row.diverse * tokens // 576))


@pytest.mark.parametrize(("tokens", "outliers"), [(576, 6), (480, 5), (2880, 29), (100, 1), (101, 2), (1, 1)])
def test_outliers_are_one_per_cent_rounded_up(tokens: int, outliers: int) -> None:
    assert FAMILIES["llava"].budgets["retain-64"].resolve(tokens).outliers == outliers


def test_a_single_token_is_the_sink_alone() -> None:
    counts = FAMILIES["llava"].budgets["retain-192"].resolve(1)
    assert (counts.outliers, counts.sink, counts.reserve, counts.diverse) == (1, 1, 0, 0)
    assert counts.kept == 1
    assert counts.stages == (1, 1, 1)


def test_reserve_is_clipped_first_and_diverse_to_what_is_left() -> None:
    greedy = Budget(Share(900, 1000), Share(900, 1000), ())
    assert greedy.resolve(100) == Counts(1, 1, 90, 9, ())
    all_reserve = Budget(Share(1, 1), Share(1, 1), ())
    assert all_reserve.resolve(100) == Counts(1, 1, 99, 0, ())


def test_groups_share_the_stages_and_each_has_its_own_sanitizer_counts() -> None:
    one, five = (FAMILIES["llava"].budgets["retain-64"].resolve(576, groups) for groups in (1, 5))
    assert (five.outliers, five.reserve, five.diverse) == (one.outliers, one.reserve, one.diverse)
    assert five.stages == (550, 370, 210)


@given(
    tokens=st.integers(1, 5000),
    reserve=st.integers(0, 1000),
    diverse=st.integers(0, 1000),
    options=st.lists(st.sampled_from(sorted(OPTIONS)), unique=True),
)
def test_no_budget_keeps_more_tokens_than_there_are(
    tokens: int, reserve: int, diverse: int, options: list[str]
) -> None:
    budget = Budget(Share(reserve, 1000), Share(diverse, 1000), (Share(1, 2),))
    for option in options:
        budget = OPTIONS[option](budget)
    counts = budget.resolve(tokens)
    assert min(counts.outliers, counts.sink, counts.reserve, counts.diverse) >= 0
    assert counts.outliers + counts.reserve + counts.diverse <= tokens
    assert counts.kept <= tokens


def test_options_change_what_they_name_and_nothing_else() -> None:
    plain = parse_budget("llava", "retain-64")
    changed = {
        "raster": {"order": "raster"},
        "drop-sink": {"aggregate": False},
        "keep-outliers": {"remove_outliers": False},
        "no-diversity": {"diverse": Share(0, 1)},
        "no-sanitizer": {"sanitizer": False},
        "serial": {"diversity_group_size": 1},
        "visual-keys": {"scores_over": "visual_keys"},
        "compact": {"positions": "compact"},
        "per-frame": {"frames": "apart"},
    }
    assert set(changed) == set(OPTIONS)
    for option, fields in changed.items():
        budget = parse_budget("llava", f"retain-64+{option}")
        assert {**vars(plain), **fields} == vars(budget)


@pytest.mark.parametrize("per_mille", [1, 10, 25, 100, 999])
def test_rho_is_an_option_with_a_number(per_mille: int) -> None:
    budget = parse_budget("llava", f"retain-64+rho-{per_mille}+raster")
    assert {**vars(parse_budget("llava", "retain-64+raster")), "outlier_per_mille": per_mille} == vars(budget)
    assert budget.resolve(576).outliers == -(-576 * per_mille // 1000)


@pytest.mark.parametrize("option", ["rho", "rho-", "rho-0", "rho-1000", "rho-2.5", "rho--5", "rho-05", "rho-²"])
def test_rho_takes_whole_per_milles_only(option: str) -> None:
    with pytest.raises(BudgetError, match=r"unknown option .* rho-N: N per mille, from 1 to 999"):
        parse_budget("llava", f"retain-64+{option}")


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("retain-64+drop-sink", Counts(6, 0, 64, 64, (110, 74, 42))),
        ("retain-64+keep-outliers", Counts(0, 0, 64, 64, (110, 74, 42))),
        ("retain-64+no-diversity", Counts(6, 1, 64, 0, (110, 74, 42))),
        ("retain-64+no-sanitizer", Counts(0, 0, 576, 0, (110, 74, 42))),
        ("retain-64+raster+serial+compact+visual-keys", LLAVA_576["retain-64"]),
    ],
)
def test_options_resolve(name: str, counts: Counts) -> None:
    assert parse_budget("llava", name).resolve(576) == counts


def test_options_add_up_in_any_order() -> None:
    one = parse_budget("llava", "retain-32+raster+visual-keys")
    assert one == parse_budget("llava", "retain-32+visual-keys+raster")
    assert (one.order, one.scores_over) == ("raster", "visual_keys")


@pytest.mark.parametrize("name", ["retain-65", "", "none", "RETAIN-64", "retain-64 ", "+compact", "compact"])
def test_an_unknown_budget_is_refused_with_the_known_names(name: str) -> None:
    with pytest.raises(BudgetError) as caught:
        parse_budget("llava", name)
    message = str(caught.value)
    assert f"'{name}'" in message
    for known in [*FAMILIES["llava"].budgets, *OPTIONS, "'llava'"]:
        assert known in message


@pytest.mark.parametrize("option", ["compacted", "", "Raster", "b=1", "retain-32"])
def test_an_unknown_option_is_refused_with_the_known_names(option: str) -> None:
    with pytest.raises(BudgetError) as caught:
        parse_budget("llava", f"retain-64+raster+{option}")
    message = str(caught.value)
    assert f"unknown option '{option}'" in message
    assert f"'retain-64+raster+{option}'" in message
    for known in OPTIONS:
        assert known in message


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (4, (0, 1, 2)),
        (6, (0, 1, 3)),
        (8, (1, 2, 4)),
        (16, (1, 3, 8)),
        (22, (1, 4, 10)),
        (24, (2, 5, 11)),
        (27, (2, 5, 13)),
        (28, (2, 6, 15)),
        (32, (2, 6, 15)),
        (36, (2, 6, 15)),
        (40, (2, 6, 15)),
        (80, (2, 6, 15)),
    ],
)
def test_prune_layers_by_depth(layers: int, expected: tuple[int, int, int]) -> None:
    assert prune_layers(layers) == expected


@pytest.mark.parametrize("layers", range(4, 100))
def test_prune_layers_ascend_and_leave_a_layer_behind_them(layers: int) -> None:
    first, second, third = prune_layers(layers)
    assert 0 <= first < second < third < layers - 1


@pytest.mark.parametrize("layers", [0, 1, 2, 3])
def test_a_decoder_too_shallow_is_refused(layers: int) -> None:
    with pytest.raises(BudgetError, match=f"{layers} layers is too shallow.*at least 4 layers"):
        prune_layers(layers)
