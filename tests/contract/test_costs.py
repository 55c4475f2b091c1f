"""Costs: curves against a brute-force fit, predictions against sums by hand, and their files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinkprune import Pipeline
from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.checks import to_json
from sinkprune.contract.errors import UsageError
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.schedule import schedule
from sinkprune.deadlines.costs import (
    COSTS_VERSION,
    ActionCosts,
    BudgetCosts,
    Costs,
    Curve,
    Place,
    Prediction,
    RecentRatios,
    fit,
    fit_measured,
    predict,
    read_action_costs,
    read_costs,
    write_costs,
)

Pipelines = Callable[..., Pipeline]
parts = st.one_of(st.just(0.0), st.floats(1e-4, 1e3))
all_rows = st.lists(st.integers(1, 3000), min_size=4, max_size=12, unique=True)


@given(parts, parts, parts, all_rows)
def test_what_is_measured_without_noise_is_found_again(a: float, b: float, c: float, rows: list[int]) -> None:
    curve = Curve(a, b, c)
    ms = [curve.ms(count) for count in rows]
    if min(ms) <= 0:
        return
    found = fit(rows, ms)
    assert [found.ms(count) for count in rows] == pytest.approx(ms, rel=1e-6)


@given(all_rows, st.lists(st.floats(1e-3, 1e5), min_size=12, max_size=12))
def test_more_rows_never_cost_less(rows: list[int], ms: list[float]) -> None:
    found = fit(rows, ms[: len(rows)])
    assert min(found.constant, found.linear, found.quadratic) >= 0
    times = [found.ms(count) for count in (0, *sorted(rows), 10_000)]
    assert times == sorted(times)


def test_one_measurement_is_in_proportion_and_none_is_nothing() -> None:
    assert fit([100], [50.0]) == Curve(0.0, pytest.approx(0.5), 0.0)
    assert fit_measured([(100, 0.0)]) == fit_measured([]) == Curve(0.0, 0.0, 0.0)
    assert fit_measured([(100, 0.0), (10, 1.0)]).ms(20) == pytest.approx(2.0)


def costs_of(manifest: Manifest) -> Costs:
    """Return costs whose parts are all of different magnitude."""
    place = Place("0" * 64, manifest.cut_after, "fp32", "fp32", "ort-cpu", "fp32", 2, "a machine")
    segments = tuple(Curve(10.0**-segment, 0.1, 1e-4) for segment in range(len(manifest.segments)))
    return Costs(
        costs_version=COSTS_VERSION,
        place=place,
        tower=Curve(0.0, 1.0, 0.0),
        sanitizer=Curve(1000.0, 1.0, 0.0),
        projector=Curve(1e5, 0.0, 0.0),
        decoders=segments,
        select=Curve(1e6, 1.0, 0.0),
        rest=0.5,
        token=Curve(2.0, 1.0, 0.0),
        token_start=(3.0, 1.5),
        pass_row=0.25,
        most_rows=100,
    )


@pytest.mark.parametrize("budget", [UNPRUNED, "retain-64"])
def test_a_prediction_is_the_sum_of_its_parts(budget: str, pipeline: Pipelines) -> None:
    small, text = pipeline("gqa-112"), 17
    manifest, (layout,) = small.bundle.manifest, small.family.largest().values()
    planned, costs = schedule(manifest, "sinkpruner", budget, [layout]), costs_of(manifest)
    first, sizes = costs.rest + 1e5, []
    if planned.plan is not None:
        first += 1000 + planned.rows
    for layers, curve in zip(manifest.segments, costs.decoders, strict=True):
        rows = text + sum(picture.reaching(layers.start) for picture in planned.pictures)
        sizes += [rows] * len(layers)
        first += curve.constant + curve.linear * rows + curve.quadratic * rows**2
        if planned.plan is not None and str(layers.stop - 1) in planned.plan.select_after:
            first += 1e6 + rows
    found = predict(costs, manifest, planned, text)
    assert found.first == pytest.approx(first)
    assert found.token == pytest.approx(2 + sum(sizes) / len(sizes))
    slower = predict(costs.slower(2.5), manifest, planned, text)
    assert tuple(slower)[:2] == pytest.approx([2.5 * part for part in found[:2]])
    assert found.later(4) == pytest.approx((3.0 + 1.5 + 2) * found.token)
    assert slower.later(4) == pytest.approx(2.5 * found.later(4))


@given(st.lists(st.floats(0, 8), max_size=4), st.floats(1e-4, 1e3), st.floats(-10, 1e4), st.integers(0, 60))
def test_tokens_within_a_time_are_the_most_that_take_at_most_that(
    start: list[float], token: float, ms: float, most: int
) -> None:
    prediction = Prediction(1.0, token, tuple(start))
    taken, fitting = 0.0, 0
    for number in range(most):
        taken += token * (start[number] if number < len(start) else 1)
        fitting = number + 1 if taken <= ms else fitting
    assert abs(prediction.within(ms, most) - fitting) <= (abs(prediction.later(fitting) - ms) < 1e-6 * abs(ms) + 1e-9)


@pytest.fixture
def costs(pipeline: Pipelines) -> Costs:
    return costs_of(pipeline("gqa-112").bundle.manifest)


def test_costs_are_read_as_they_were_written(costs: Costs, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    measured = {"measured_at": 1.75e9, "load": 0.25, "recent": RecentRatios((0.5, 2.0), (1.25,))}
    for written in (costs, replace(costs, **measured)):
        write_costs(path, written)
        assert read_costs(path, costs.place) == written
    for chunk in (COSTS, replace(COSTS, **measured)):
        write_costs(path, chunk)
        found = read_action_costs(path, PLACE)
        # The order of budgets is that of choices.
        assert found == chunk and list(found.budgets) == list(BUDGETS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"costs_version": 4}, "have the version 4, this sinkprune reads 5"),
        ({"token_start": [-1]}, "malformed at $.token_start[0]"),
        ({"load": 2}, "malformed at $.load"),
        ({"recent": {"first": [-1], "token": []}}, "malformed at $.recent.first[0]"),
        ({"costs_version": True}, "have the version True"),
        ({"rest": "1"}, "malformed at $.rest"),
        ({"decoders": []}, "are of 0 decoder segments"),
        ({"tower": {"constant": 1}}, "malformed at $.tower"),
        *((content, "costs") for content in (None, "", "{")),
        *((content, "is no file of costs: found no costs_version.") for content in ("[]", '"x"', '{"text": "4"}')),
    ],
)
def test_other_files_are_rejected(change: Any, said: str, costs: Costs, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    if change is not None:
        path.write_text(change if isinstance(change, str) else json.dumps({**to_json(costs), **change}))
    with pytest.raises(UsageError) as refusal:
        read_costs(path, costs.place)
    assert said in str(refusal.value) and "sinkprune-run --warm-up" in str(refusal.value)


def test_costs_of_another_place_are_rejected(costs: Costs, tmp_path: Path) -> None:
    write_costs(tmp_path / "costs.json", costs)
    for field in Place.__dataclass_fields__:
        other = {"cut_after": (1,), "threads": 3}.get(field, "another")
        with pytest.raises(UsageError, match=f"of another place: their '{field}' is"):
            read_costs(tmp_path / "costs.json", replace(costs.place, **{field: other}))


MS = st.floats(0.01, 1e4)
PLACE = Place("0" * 64, (1, 3), "fp32", "int8", "ort-cpu", "fp32", 2, "a machine")
BUDGETS = {
    "none": BudgetCosts(100.0, 10.5, 276.5),
    "prune-80": BudgetCosts(50.0, 8.0, 61.5),
    "prune-8": BudgetCosts(60.0, 9.0, 130.0),
}
COSTS = ActionCosts("sinkpruner", 2, BUDGETS, place=PLACE, prompt_tokens=20)


@st.composite
def measured_budgets(draw: st.DrawFn) -> dict[str, BudgetCosts]:
    """The costs of one to three budgets, the largest first."""
    drawn = draw(st.lists(st.tuples(MS, MS, st.floats(1, 1000)), min_size=1, max_size=3))
    ordered = sorted(drawn, key=lambda each: -each[2])
    return {name: BudgetCosts(*each) for name, each in zip(BUDGETS, ordered, strict=False)}


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
