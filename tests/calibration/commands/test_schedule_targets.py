"""Targets in milliseconds of `sinkprune-calibrate schedule`: what is promised, tried and advised."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import pytest

from sinkprune import Pipeline
from sinkprune.calibration.evaluation.report import Combination
from sinkprune.calibration.scheduling import propose as propose_module
from sinkprune.calibration.scheduling.propose import Proposer
from sinkprune.calibration.scheduling.search import RequestTimes
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.checks import from_json
from sinkprune.contract.errors import NumericsError
from sinkprune.contract.report import Spread
from sinkprune.deadlines.costs import COSTS_VERSION, Costs, Curve, predict
from support.programs.commands import assert_refused, wrote
from support.programs.schedule_runs import schedule
from support.programs.slow_cases import slow

Bundles = Callable[..., Path]

pytestmark = pytest.mark.usefixtures("no_note_of_load")


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Have requests take a millisecond a row and segment, and the slowest of them a number of times as long."""

    def measure_costs(pipeline: Pipeline, *given: object) -> Costs:
        nothing, row = Curve(0.0, 0.0, 0.0), Curve(0.0, 1.0, 0.0)
        segments = (row,) * len(pipeline.bundle.manifest.segments)
        return Costs(
            COSTS_VERSION, pipeline.place, nothing, nothing, nothing, segments, nothing, 1.0, row, (), 0.0, 10**6
        )

    def set_tail(tail: float) -> None:
        def measure(times: RequestTimes, combinations: Sequence[Combination], new_tokens: int) -> list[Spread]:
            # As costs predict, and so many times as long in one of 20 requests
            times.requests = 20
            predicted = [times.predict(each, new_tokens) for each in combinations]
            return [Spread(ms, tail * ms) for ms in predicted]

        monkeypatch.setattr(Pipeline, "measure_costs", measure_costs)
        monkeypatch.setattr(RequestTimes, "measure", measure)

    return set_tail


@pytest.mark.parametrize("tail", [slow(1.0), 1.25])
def test_a_time_is_met_by_95_of_100_requests(
    tail: float, own: Path, simulated: Callable[[float], None], tmp_path: Path
) -> None:
    simulated(tail)
    refused = schedule(own, "--target-ms", 1, "--json", tmp_path / "r.json")
    assert refused.code == 2
    told = json.loads((tmp_path / "r.json").read_text())
    assert refused.stderr == f"wrote {tmp_path}/r.json\nerror: {told['error']}\n"
    keys = {"costs", "error", "requests", "nearest_target_ms", "nearest_budget_tokens"}
    assert set(told) == {*keys, "notes", "seen_share"}
    assert f"may meet is --target-ms {told['nearest_target_ms']}. " in told["error"]
    assert told["nearest_budget_tokens"] is None
    target, report = 250, tmp_path / "report.json"
    outcome = schedule(own, "--target-ms", target, "--json", report)
    assert (outcome.code, outcome.stderr) == (0, wrote(report))
    assert f"in-{target}ms" in read_bundle(own).manifest.budgets
    assert (
        f"Run the budget: sinkprune-run {own} --budget in-{target}ms, with --image and --prompt\n" in outcome.stdout
    )
    assert json.loads(report.read_text())["cheapest_p95_ms"] is None
    predicted = json.loads(report.read_text())["chosen"]["predicted_ms"]
    # Most of the time is used.
    assert 0.8 * target < tail * predicted <= target


def test_tokens_that_no_budget_takes_have_a_nearest_number(
    own: Path, simulated: Callable[[float], None], tmp_path: Path
) -> None:
    simulated(1.0)
    refused = schedule(own, "--budget-tokens", 1, "--json", tmp_path / "r.json")
    told = json.loads((tmp_path / "r.json").read_text())
    assert refused.code == 2 and told["nearest_target_ms"] is None
    nearest = told["nearest_budget_tokens"]
    assert told["error"].endswith(f"may meet is --budget-tokens {nearest:g}. Give that.")
    assert schedule(own, "--budget-tokens", nearest, "--dry-run").code == 0


def test_an_unpruned_model_that_is_in_time_most_of_the_time_is_pruned(
    own: Path, simulated: Callable[[float], None], tmp_path: Path
) -> None:
    simulated(1.0)
    costs = tmp_path / "costs.json"
    refused = schedule(own, "--target-ms", 60_000, "--costs", costs, "--json", tmp_path / "refused.json")
    assert refused.code == 2 and "no budget was added, because no pruning is needed" in refused.stderr
    assert "in 95 of 100 requests" in refused.stderr and from_json(Costs, json.loads(costs.read_text())).rest > 0
    assert json.loads((tmp_path / "refused.json").read_text())["nearest_target_ms"] is None
    (unpruned,) = re.findall(r"takes up to (\d+) ms", refused.stderr)
    report, target = tmp_path / "report.json", 1.1 * float(unpruned)
    simulated(1.25)
    outcome = schedule(own, "--target-ms", target, "--name", "quick", "--json", report)
    assert (outcome.code, outcome.stderr) == (0, wrote(report))
    assert 0.8 * target < json.loads(report.read_text())["measured_ms"]["p95"] <= target


def test_a_budget_that_was_in_time_is_kept_where_the_next_is_not(
    own: Path, simulated: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time that it leaves is tried by a larger one, and then by one between the two."""
    simulated(1.0)
    spreads = iter([Spread(60.0, 66.0), Spread(200.0, 250.0), Spread(120.0, 138.0)])

    def measure(times: RequestTimes, combinations: Sequence[Combination], new_tokens: int) -> list[Spread]:
        times.requests = 20
        return [next(spreads), Spread(400.0, 400.0)]

    monkeypatch.setattr(RequestTimes, "measure", measure)
    outcome = schedule(own, "--target-ms", 150)
    assert outcome.code == 0
    assert "measured 120 ms (p95 138 ms)" in outcome.stdout and "searched 3 times" in outcome.stdout
    assert next(spreads, None) is None


@pytest.mark.parametrize("disturbed", [{1}, {1, 3}, {2}, {1, 2}])
def test_disturbed_measurements_do_not_choose_a_tiny_budget(
    disturbed: set[int],
    own: Path,
    simulated: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """One request of 20 took six times as long: by that tail, only the cheapest budgets are in time."""
    simulated(1.05)
    steady, calls, report = RequestTimes.measure, count(1), tmp_path / "report.json"

    def measure(times: RequestTimes, combinations: Sequence[Combination], new_tokens: int) -> list[Spread]:
        found = steady(times, combinations, new_tokens)
        return [Spread(each.median, 6.0 * each.median) for each in found] if next(calls) in disturbed else found

    monkeypatch.setattr(RequestTimes, "measure", measure)
    assert schedule(own, "--target-ms", 250, "--dry-run", "--json", report).code == 0
    told = json.loads(report.read_text())
    assert 0.8 * 250 < told["measured_ms"]["p95"] <= 250 and told["searches"] <= 6


def test_a_name_that_would_promise_too_much_is_not_given(
    own: Path, simulated: Callable[[float], None], tmp_path: Path
) -> None:
    simulated(50.0)
    report, costs = tmp_path / "report.json", tmp_path / "costs.json"
    outcome = schedule(own, "--target-ms", 250, "--json", report, "--costs", costs)
    assert outcome.code == 2
    told = json.loads(report.read_text())
    p95, nearest = told["measured_ms"]["p95"], told["nearest_target_ms"]
    assert f"'in-250ms' was found and not added: 95 of 100 requests took up to {p95:.0f} ms" in outcome.stderr
    assert f"--target-ms {nearest}" in outcome.stderr and 250 < nearest < 1.1 * p95
    cheapest = told["cheapest_p95_ms"]
    assert nearest == math.ceil(1.1 * cheapest)
    found = f"{cheapest:.0f} ms" if cheapest >= 100 else f"{cheapest:.1f} ms"
    why = f"That is a tenth more than {found}, in which 95 of 100 requests with the cheapest budget ended."
    assert f"give --target-ms {nearest}. {why}" in outcome.stderr
    assert "in-250ms" not in read_bundle(own).manifest.budgets
    assert from_json(Costs, json.loads(costs.read_text())) == from_json(
        Costs, json.loads(report.read_text())["costs"]
    )
    named = schedule(own, "--target-ms", 250, "--name", "quick")
    assert named.code == 2
    assert named.stderr.startswith("error: budget 'quick' was added, and misses its target: 95 of 100 requests took")
    assert "quick" in read_bundle(own).manifest.budgets


def test_costs_are_written_where_no_budget_is_found(
    own: Path, simulated: Callable[[float], None], tmp_path: Path
) -> None:
    simulated(1.0)
    costs = tmp_path / "costs.json"
    outcome = schedule(own, "--target-ms", 1, "--costs", costs)
    assert outcome.code == 2 and "--seconds" not in outcome.stderr
    least = re.search(r"the least is ([0-9.]+), .* may meet is --target-ms (\d+)\.", outcome.stderr)
    assert least is not None and float(least[1]) < float(least[2]) < 1.2 * float(least[1]) + 1
    assert from_json(Costs, json.loads(costs.read_text())).rest == 1.0
    assert schedule(own, "--target-ms", least[2]).code == 0


def test_a_target_rejected_after_few_requests_names_their_number(own: Path, tmp_path: Path) -> None:
    """Short measurements do not end the search: they are of few requests, so that one slow request decides."""
    refused = schedule(own, "--target-ms", 1, "--json", tmp_path / "r.json")
    assert refused.code == 2
    assert " 3 requests of each: of fewer than 20, p95 is close to the slowest. A larger --seconds " in refused.stderr
    assert json.loads((tmp_path / "r.json").read_text())["requests"] == 3


Measure = Callable[[RequestTimes, Sequence[Combination], int], list[Spread]]


def slower_machine(times_as_slow: float, late_ms: float) -> Measure:
    """Return measurements of a machine that is slower than its costs, and later still in one of 20 requests."""

    def measure(times: RequestTimes, combinations: Sequence[Combination], new_tokens: int) -> list[Spread]:
        pipeline, times.requests = times._pipeline, 20
        # `simulated` costs have no tower.
        costs, manifest = pipeline.measure_costs(None, 0.0).slower(times_as_slow), pipeline.bundle.manifest  # type: ignore[arg-type]
        each = [predict(costs, manifest, times.schedule(one), times.text_tokens) for one in combinations]
        predicted = [one.first + one.later(new_tokens - 1) for one in each]
        return [Spread(ms, ms + late_ms) for ms in predicted]

    return measure


@pytest.mark.parametrize("asked", [1, 150])
def test_the_nearest_target_is_met(
    asked: float, own: Path, simulated: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delay that all budgets have makes the tail of small budgets longer than that of the unpruned model."""
    simulated(1.0)
    monkeypatch.setattr(RequestTimes, "measure", slower_machine(1.0, 200.0))
    refused = schedule(own, "--target-ms", asked)
    assert refused.code == 2
    nearest = re.search(r"--target-ms (\d+)", refused.stderr)
    assert nearest is not None
    assert schedule(own, "--target-ms", nearest[1]).code == 0


def test_the_cheapest_budget_is_tried_before_a_target_is_rejected(
    own: Path, simulated: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Costs that were measured under load predict that no budget is in time."""
    simulated(1.0)
    monkeypatch.setattr(RequestTimes, "measure", slower_machine(0.5, 0.0))
    report = tmp_path / "report.json"
    refused = schedule(own, "--target-ms", 1)
    (least,) = re.findall(r"the least is ([0-9.]+)", refused.stderr)
    outcome = schedule(own, "--target-ms", 1.5 * float(least), "--json", report)
    assert (outcome.code, outcome.stderr) == (0, wrote(report))
    told = json.loads(report.read_text())
    assert told["searches"] > 1 and "searched 2 times" in outcome.stdout
    # Most of the time is used: the search went on from there.
    assert 1.3 * float(least) < told["measured_ms"]["p95"] <= 1.5 * float(least)


def test_a_prediction_that_misses_its_measurement_is_told(
    own: Path, simulated: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The machine became twice as slow after the costs were measured, so that no budget meets the target."""
    simulated(1.0)
    refused = schedule(own, "--target-ms", 1)
    (least,) = re.findall(r"the least is ([0-9.]+)", refused.stderr)
    target, report = 1.3 * float(least), tmp_path / "report.json"
    monkeypatch.setattr(RequestTimes, "measure", slower_machine(2.0, 0.0))
    outcome = schedule(own, "--target-ms", target, "--json", report)
    assert outcome.code == 2 and "was found and not added" in outcome.stderr
    named = schedule(own, "--target-ms", target, "--name", "quick", "--json", report)
    assert named.code == 2
    written, *warnings = named.stderr.splitlines()
    assert written == f"wrote {report}" and warnings[0].startswith(
        "warning: the prediction misses the measurement by 50.0 %, more than 8 %"
    )
    assert warnings[1].startswith("error: budget 'quick' was added, and misses its target: 95 of 100 requests took")
    told = json.loads(report.read_text())
    why = "because earlier budgets missed the target or left much of the time"
    assert f"searched {told['searches']} times, {why}\n" in named.stdout and told["searches"] > 1
    assert "the prediction is 50.0 % too low" in named.stdout
    assert told["nearest_target_ms"] == math.ceil(1.1 * 2 * float(least))


def test_a_target_missed_on_a_busy_machine_advises_fewer_threads(
    own: Path, simulated: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated(1.0)
    monkeypatch.setattr(propose_module, "LOADED", -1.0)
    assert_refused(schedule(own, "--target-ms", 1, "--threads", 2), "Other programs took", "compare --threads 1")
    alone = schedule(own, "--target-ms", 1, "--threads", 1)
    assert "Other programs took" in alone.stderr and "--threads" not in alone.stderr


def test_no_budget_is_added_where_the_unpruned_model_meets_the_target_after_all(
    own: Path, simulated: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated(1.0)
    # While the costs were measured, the machine was four times as slow.
    monkeypatch.setattr(RequestTimes, "measure", slower_machine(0.25, 0.0))
    outcome = schedule(own, "--target-ms", 250)
    assert_refused(outcome, "no budget was added, because no pruning is needed")
    assert "in-250ms" not in read_bundle(own).manifest.budgets


def test_another_error_keeps_the_costs_too(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Proposer, "_attention", Mock(side_effect=NumericsError("not finite")))
    outcome = schedule(own, "--budget-tokens", 16, "--costs", tmp_path / "costs.json")
    assert (outcome.code, outcome.stderr.splitlines()[-1]) == (2, "error: not finite")
    assert len(from_json(Costs, json.loads((tmp_path / "costs.json").read_text())).decoders) == 4
