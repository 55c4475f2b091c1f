"""Files of what a policy's chunks cost: read as they were written, and rejected if they are anything else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinkprune.deadlines.costs import ActionCosts, BudgetCosts, Place, RecentRatios, read_action_costs, write_costs

MS = st.floats(0.01, 1e4)
PLACE = Place("0" * 64, (1, 3), "fp32", "int8", "ort-cpu", "fp32", 2, "a machine")
BUDGETS = {
    "none": BudgetCosts(100.0, 10.5, 276.5),
    "prune-80": BudgetCosts(50.0, 8.0, 61.5),
    "prune-8": BudgetCosts(60.0, 9.0, 130.0),
}
COSTS = ActionCosts("sinkpruner", 2, BUDGETS, place=PLACE, prompt_tokens=20)


def test_costs_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    for written in (COSTS, replace(COSTS, measured_at=1.75e9, load=0.25, recent=RecentRatios((0.5, 2.0), (1.25,)))):
        write_costs(path, written)
        found = read_action_costs(path, PLACE)
        # The order of budgets is that of choices.
        assert found == written and list(found.budgets) == list(BUDGETS)


@st.composite
def measured_budgets(draw: st.DrawFn) -> dict[str, BudgetCosts]:
    """The costs of one to three budgets, the largest first."""
    drawn = draw(st.lists(st.tuples(MS, MS, st.floats(1, 1000)), min_size=1, max_size=3))
    ordered = sorted(drawn, key=lambda each: -each[2])
    return {name: BudgetCosts(*each) for name, each in zip(BUDGETS, ordered, strict=False)}


@given(measured_budgets(), st.integers(0, 500), st.integers(0, 500))
def test_each_text_token_above_the_measured_prompt_costs_as_much(
    budgets: dict[str, BudgetCosts], measured: int, text: int
) -> None:
    costs = replace(COSTS, budgets=budgets, prompt_tokens=measured)
    ordered = [(own.before_ms, own.step_ms, own.rows or 0.0) for own in budgets.values()]
    (before, step, rows), (_, least_step, least_rows) = ordered[0], ordered[-1]
    more = max(text - measured, 0)
    of_a_row = step / rows if rows == least_rows else max(step - least_step, 0) / (rows - least_rows)
    found = costs.of_chunk(text, costs.frames)
    assert list(found) == list(budgets)
    for name, own in budgets.items():
        assert found[name].before_ms == pytest.approx(own.before_ms + more * before / rows)
        assert found[name].step_ms == pytest.approx(own.step_ms + more * of_a_row)
        assert found[name].rows == own.rows


def test_frames_that_are_missing_leave_out_their_share_of_the_visual_rows() -> None:
    budgets = {"none": BudgetCosts(100.0, 10.0, 420.0), "prune-80": BudgetCosts(60.0, 8.0, 220.0)}
    costs = replace(COSTS, frames=4, budgets=budgets, prompt_tokens=20)
    found = costs.of_chunk(20, 1)
    # 300 of 400 visual rows less, at 0.2 ms before the steps and 0.01 ms in each; then 150 of 200.
    assert (found["none"].before_ms, found["none"].step_ms) == pytest.approx((40.0, 7.0))
    assert (found["prune-80"].before_ms, found["prune-80"].step_ms) == pytest.approx((30.0, 6.5))
    longer = costs.of_chunk(40, 1)["none"]
    assert longer.before_ms == pytest.approx(40 + 20 * 100 / 420) and longer.step_ms == pytest.approx(7.2)
    assert costs.of_chunk(0, 4) == budgets
    # One budget, or budgets that cost the same, do not show what a row saves.
    one = replace(costs, budgets={"none": budgets["none"]})
    assert one.of_chunk(20, 1) == one.budgets


@given(measured_budgets(), st.integers(0, 500), st.integers(1, 4))
def test_fewer_frames_never_cost_more_and_always_something(
    budgets: dict[str, BudgetCosts], measured: int, frames: int
) -> None:
    costs = replace(COSTS, frames=4, budgets=budgets, prompt_tokens=measured)
    for name, own in costs.of_chunk(measured, frames).items():
        assert 0 < own.before_ms <= budgets[name].before_ms and 0 < own.step_ms <= budgets[name].step_ms
