"""Budgets chosen for a deadline on machines that are simulated, down to the clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sinkprune import Pipeline
from sinkprune.contract.schedule import schedule
from sinkprune.deadlines.costs import Costs, Curve, Place, predict
from sinkprune.deadlines.policy import WINDOW, DeadlinePolicy, RequestHistory
from sinkprune.runtime.steps.answer import DeadlineReport
from sinkprune.runtime.steps.context_length import runnable
from sinkprune.runtime.steps.request import Request, new_request

Pipelines = Callable[..., Pipeline]
Slowness = Callable[[int], float]
"""How many times as long as by its costs the request of a number takes."""

TEXT = 20
TOWER_MS = 50.0


class Machine:
    """Answers requests in no time, on a clock of its own."""

    def __init__(self, pipeline: Pipeline, slowness: Slowness, tokens: int = 4) -> None:
        manifest = pipeline.bundle.manifest
        self.layouts = [*pipeline.family.largest().values()]
        place = Place("", manifest.cut_after, "fp32", "fp32", "ort-cpu", "fp32", 1, "simulated")
        nothing, token = Curve(0.0, 0.0, 0.0), Curve(5.0, 0, 0)
        segments = tuple(Curve(1.0 * len(layers), 0.05 * len(layers), 0.0) for layers in manifest.segments)
        self.costs = Costs(1, nothing, nothing, nothing, segments, nothing, 30.0, token, (), 0.0, 10**9, place=place)
        self._manifest, self._slowness, self._tokens = manifest, slowness, tokens
        self.seconds, self.history, self.number = 0.0, RequestHistory(), 0

    def now(self) -> float:
        return self.seconds

    def answer(self, request: Request, deadline_ms: float) -> tuple[DeadlineReport, str]:
        """The report on one request, and why it ended, as a pipeline runs it."""
        slow = self._slowness(self.number)
        self.number += 1
        # Passes of one row take as long as tokens.
        passes = [(0,)] * (request.max_new_tokens - 1) if request.choice else None
        policy = DeadlinePolicy(
            self._manifest, request, None, passes, deadline_ms, self.costs, self.history, self.now
        )
        candidates = policy.candidates(self.layouts)
        possible = runnable(self._manifest, None, request, candidates, TEXT, self.layouts)
        self.seconds += slow * TOWER_MS / 1e3
        chosen = policy.choose(possible, TEXT)
        expected = predict(self.costs, self._manifest, chosen, TEXT)
        self.seconds += slow * expected.first / 1e3
        policy.first_token()
        steps: list[float] = []
        while not (finish := "stop" if len(steps) + 1 >= self._tokens else policy.finish(len(steps) + 1)):
            self.seconds += slow * expected.token / 1e3
            steps.append(slow * expected.token)
        report = policy.ended(steps, reused=False)
        assert report.budget == chosen.budget
        return report, finish


@pytest.fixture(scope="module")
def small(pipeline: Pipelines) -> Pipeline:
    return pipeline("gqa-112")


def policy_of(small: Pipeline, machine: Machine, request: Request, passes: Any = None) -> DeadlinePolicy:
    """Return a policy that chose the unpruned model."""
    manifest, rest = small.bundle.manifest, (machine.costs, machine.history, machine.now)
    policy = DeadlinePolicy(manifest, request, None, passes, 10_000, *rest)
    policy.choose([schedule(manifest, "sinkpruner", "none", machine.layouts)], TEXT)
    return policy


def asked(tokens: int = 4, **options: object) -> Request:
    return new_request(np.zeros((8, 8, 3), np.uint8), "What?", max_new_tokens=tokens, **options)


def reports(small: Pipeline, slowness: Slowness, deadline_ms: float, count: int) -> list[DeadlineReport]:
    machine = Machine(small, slowness)
    return [machine.answer(asked(), deadline_ms)[0] for _ in range(count)]


def budgets(found: Sequence[DeadlineReport]) -> list[str]:
    return [report.budget for report in found]


def first_ms(small: Pipeline, budget: str) -> float:
    """When the first token comes at a budget, on a quiet machine."""
    manifest, layouts = small.bundle.manifest, [*small.family.largest().values()]
    planned = schedule(manifest, "sinkpruner", budget, layouts)
    return TOWER_MS + predict(Machine(small, quiet).costs, manifest, planned, TEXT).first


def quiet(number: int) -> float:
    return 1.0


def test_a_quiet_machine_runs_the_largest_budget_that_fits(small: Pipeline) -> None:
    three = 3 * 5.0
    for name in ("none", "retain-192", "retain-128", "retain-64", "retain-32"):
        # All of four tokens, and as much more as is expected of a machine that was never asked.
        needed = TOWER_MS + 1.38 * (first_ms(small, name) - TOWER_MS + three)
        (report,) = reports(small, quiet, needed, 1)
        assert (report.budget, report.met, report.can_meet) == (name, True, True)
        assert report.measured_ms == pytest.approx(first_ms(small, name) + three)
        assert report.measured_ms <= report.predicted_ms <= needed
        (report,) = reports(small, quiet, needed - 8, 1)
        assert report.budget != name or name == "retain-32"
    assert "earliest first token" in report.reason


def test_a_budget_that_is_given_is_the_largest(small: Pipeline) -> None:
    for deadline, budget in ((10_000, "retain-64"), (first_ms(small, "retain-32"), "retain-32")):
        report, _ = Machine(small, quiet).answer(asked(budget="retain-64"), deadline)
        assert report.budget == budget


def test_a_budget_that_is_smaller_only_because_of_the_tokens_says_so(small: Pipeline) -> None:
    def deadline(budget: str, count: int) -> float:
        """The earliest deadline at which so many tokens are expected."""
        return TOWER_MS + 1.05 * 1.3 * (first_ms(small, budget) - TOWER_MS + (count - 1) * 5.0)

    def reason(given: float, request: Request) -> str:
        return Machine(small, quiet).answer(request, given)[0].reason

    advice, given = "set max_new_tokens", deadline("none", 5) + 1
    assert advice not in reason(given, asked(5))
    # As few more as a smaller budget has time for.
    wanted = max(count for count in range(1, 99) if deadline("retain-32", count) <= given)
    assert f"all {wanted} tokens in time; budget none would bring 5: {advice}" in reason(given, asked(wanted))
    # Not even the first token of a larger budget comes in time: fewer tokens would change nothing.
    assert deadline("none", 1) > deadline("retain-192", 2) + 1
    assert advice not in reason(deadline("retain-192", 2) + 1, asked(2))
    # A closed list has its own length.
    listed = reason(deadline("none", 2) + 1, asked(60, choice=("yes", "no")))
    assert advice not in listed and "compare the whole list" in listed


def test_load_moves_it_to_smaller_budgets_and_quiet_moves_it_back(small: Pipeline) -> None:
    deadline = 2.1 * (first_ms(small, "retain-32") + 15)

    def halved(number: int) -> float:
        return 2.0 if 50 <= number < 120 else 1.0

    found = reports(small, halved, deadline, 220)
    assert set(budgets(found[:50])) == {"none"}
    # One miss tells it, and it knows from then on.
    assert [report.met for report in found[50:120]] == [False] + [True] * 69
    assert set(budgets(found[52:120])) == {"retain-64"}
    assert all(report.met for report in found[120:])
    assert budgets(found[120 + WINDOW :]) == ["none"] * (100 - WINDOW)
    assert [found[number].slower for number in (60, 121, 219)] == pytest.approx([2.1, 2.1, 1.05])


def test_requests_that_are_faster_than_their_costs_correct_what_is_expected(small: Pipeline) -> None:
    """Costs that were measured under load are three times too high."""
    whole = first_ms(small, "none") + 15
    found = reports(small, lambda number: 1 / 3, 0.6 * whole, 60)
    assert found[0].budget != "none"
    assert budgets(found[1:]) == ["none"] * 59
    assert all(report.met for report in found)
    assert [found[number].slower for number in (0, 1, 19, 20)] == pytest.approx([1.365, 0.455, 0.455, 0.35])
    # One slow request among fast ones is expected again. Of few requests, one that is slower than all is expected.
    found = reports(small, lambda number: 2.0 if number == 5 else 1 / 3, 1e4, 60)
    assert [found[number].slower for number in (5, 6, 45, 46)] == pytest.approx([0.455, 2.1, 2.1, 0.35])
    found = reports(small, lambda number: 2.0, 1e4, 25)
    assert [found[number].slower for number in (1, 19, 20)] == pytest.approx([2.73, 2.73, 2.1])


def test_a_request_a_process_is_expected_as_in_one_process(small: Pipeline) -> None:
    slow = random.Random(1)
    times = [slow.uniform(0.3, 0.5) if number < 50 else slow.uniform(1.0, 2.0) for number in range(100)]
    deadline = 1.6 * first_ms(small, "retain-32")
    machine = Machine(small, lambda number: times[number])
    found = list[DeadlineReport]()
    for _ in times:
        machine.history = RequestHistory(machine.history.recent)
        found.append(machine.answer(asked(), deadline)[0])
    assert len(machine.history.recent.first) == WINDOW
    together = reports(small, lambda number: times[number], deadline, 100)
    assert [report.slower for report in found] == [report.slower for report in together]
    assert budgets(found) == budgets(together)


@pytest.mark.parametrize("kind", ["even", "bursts", "heavy-tailed", "drifting"])
def test_95_of_100_are_met_wherever_any_budget_can(small: Pipeline, kind: str) -> None:
    chance = random.Random(kind)

    def slowness(number: int) -> float:
        if kind == "even":
            return chance.uniform(1.0, 1.6)
        if kind == "bursts":
            return chance.uniform(1.8, 2.1) if number // 25 % 3 == 1 else chance.uniform(1.0, 1.2)
        if kind == "heavy-tailed":
            return 0.9 + min(0.3 * chance.paretovariate(2.5), 1.2)
        return 1.0 + 0.5 * np.sin(number / 30) + chance.uniform(0.0, 0.3)

    # The smallest budget can, at the slowest that the machine gets.
    slowest = 2.1 * first_ms(small, "retain-32")
    for deadline in (slowest, 1.2 * slowest):
        found = reports(small, slowness, deadline, 200)
        assert sum(report.met for report in found) >= 190, (kind, deadline, budgets(found))


def test_where_nothing_can_meet_it_the_fastest_runs_and_is_reported(small: Pipeline) -> None:
    for report in reports(small, quiet, 40.0, 3):
        assert (report.budget, report.can_meet, report.met) == ("retain-32", False, False)
        assert report.expected_tokens == 1
        assert report.predicted_first_ms >= first_ms(small, "retain-32")
        assert "no budget" in report.reason


@pytest.mark.parametrize(("first", "token"), [(1.6, 1.0), (1.0, 1.6), (0.5, 3.0)])
def test_a_slow_request_changes_no_earliest_first_token(small: Pipeline, first: float, token: float) -> None:
    """All work before the first token has one slowdown, so recent requests cannot reorder budgets."""
    machine = Machine(small, quiet)
    report, _ = machine.answer(asked(), 40.0)
    manifest, layouts = small.bundle.manifest, machine.layouts
    planned = schedule(manifest, "sinkpruner", report.budget, layouts)
    usual = predict(machine.costs, manifest, planned, TEXT)
    machine.history.add(usual, first * usual.first, token * usual.token, 1)
    assert machine.answer(asked(), 40.0)[0].budget == report.budget == "retain-32"


def test_passes_of_a_closed_list_count_by_their_rows(small: Pipeline) -> None:
    machine, passes = Machine(small, quiet), [(0,) * count for count in (1, 4, 9)]
    machine.costs = replace(machine.costs, token_start=(1.5,), pass_row=2.0)
    policy = policy_of(small, machine, asked(1, choice=("yes", "no")), passes)
    policy.first_token()
    report = policy.ended([], reused=False)
    # A token takes 5 ms, and the first after the prompt 7.5.
    expected = 3 * 7.5 + (0 + 3 + 8) * 2.0
    assert report.predicted_ms - report.predicted_first_ms == pytest.approx(1.05 * 1.3 * expected)
    assert report.expected_tokens == 4


@pytest.mark.parametrize(
    ("tokens", "ratio"), [((), 2.0), ((15.0,), (3 + 7 * 2) / 8), ((15.0,) * 8, 3.0), ((15.0,) * 30, 3.0)]
)
def test_short_answers_say_little_about_long_ones(tokens: tuple[float, ...], ratio: float, small: Pipeline) -> None:
    """All before the first token takes twice as long as its costs, and each later token three times."""
    machine = Machine(small, quiet)
    policy = policy_of(small, machine, asked(40))
    machine.seconds += 2 * (first_ms(small, "none") - TOWER_MS) / 1e3
    policy.first_token()
    policy.ended(tokens, reused=False)
    assert machine.history.recent.first == pytest.approx([2.0])
    assert machine.history.recent.token == pytest.approx([ratio])


def test_tokens_end_in_time(small: Pipeline) -> None:
    deadline = first_ms(small, "retain-32") + 100
    machine = Machine(small, quiet, tokens=1000)
    report, finish = machine.answer(asked(500), deadline)
    assert (report.budget, finish) == ("retain-32", "deadline")
    assert deadline - 7 < report.measured_ms <= deadline
    # Less than what fits: nothing is known of the machine yet.
    expected = (100 - 0.365 * (first_ms(small, "retain-32") - TOWER_MS)) // (5 * 1.3 * 1.05)
    assert report.expected_tokens == 1 + expected
    assert machine.answer(asked(3), 10_000)[1] == "length"
    # Where tokens are slower than expected, the last is late at most.
    late = 3 * first_ms(small, "retain-32") + 100
    report, finish = Machine(small, lambda number: 3.0, tokens=1000).answer(asked(500), late)
    assert finish == "deadline" and report.measured_ms <= late + 3 * 5
