"""Chunks with a deadline: the choice, against every combination tried one by one; what is measured and refused."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from sinkprune import Policy, read_action_costs, write_costs
from sinkprune.contract.errors import BudgetError, DeadlineError, UsageError
from sinkprune.deadlines.costs import ActionCosts, BudgetCosts, Place, Prediction
from sinkprune.deadlines.policy import MARGIN, RequestHistory
from sinkprune.policies.deadline import FEWEST_STEPS, MEASURED_STEPS, ChunkDeadline, measure_costs
from sinkprune.policies.report import ActionDeadline, ActionReport
from sinkprune.runtime.profiling.other_load import OtherLoad

BUDGETS = ("prune-77.8", "prune-88.9")
NAMES = ("none", *BUDGETS)
STATE = [0.5] * 5
MS = st.floats(0.01, 1e4)
PLACE = Place("0" * 64, (), "fp32", "fp32", "ort-cpu", "fp32", 2, "a machine")


def costs_of(ms: dict[str, tuple[float, float]], method: str = "sinkpruner", frames: int = 1) -> ActionCosts:
    """Costs that were not measured."""
    # No prompt is longer than the measured one.
    budgets = {name: BudgetCosts(*each, rows=1) for name, each in ms.items()}
    return ActionCosts(method, frames, budgets, place=PLACE, prompt_tokens=10**6)


def choose(
    costs: ActionCosts,
    deadline_ms: float,
    most: int,
    least: int,
    budget: str = "none",
    history: RequestHistory | None = None,
    spent_ms: float = 0.0,
) -> ActionDeadline:
    """The choice of a policy after the chunks of `history`; without it, of one that has run nothing yet."""
    given = {"began": 0.0, "budget": budget, "most_steps": most, "least_steps": least, "frames": costs.frames}
    history = history or RequestHistory()
    own = ChunkDeadline(costs, history, deadline_ms=deadline_ms, now=lambda: spent_ms / 1e3, **given)
    own.choose(0)
    return own.report([], comparable=False)


@given(
    st.lists(st.tuples(MS, MS), min_size=3, max_size=3),
    st.floats(1, 1e5),
    st.integers(1, 12),
    st.integers(1, 12),
    st.sampled_from(NAMES),
    st.sampled_from([0.0, 0.5, 700.0]),
)
def test_the_choice_is_the_first_that_fits(
    ms: list[tuple[float, float]], deadline_ms: float, one: int, other: int, budget: str, spent_ms: float
) -> None:
    """Largest budget first, and then most steps: every combination is tried in that order."""
    least, most = sorted((one, other))
    costs = costs_of(dict(zip(NAMES, ms, strict=True)))
    found = choose(costs, deadline_ms, most, least, budget, spent_ms=spent_ms)
    slower = RequestHistory().slower
    assert slower.first == slower.token > MARGIN
    allowed = NAMES[NAMES.index(budget) :]
    near = 1e-9 * deadline_ms

    def expected(name: str, steps: int) -> float:
        own = costs.budgets[name]
        return spent_ms + slower.first * own.before_ms + steps * slower.token * own.step_ms

    def first(limit: float) -> tuple[str, int] | None:
        every = itertools.product(allowed, range(most, least - 1, -1))
        return next((each for each in every if expected(*each) <= limit), None)

    # A chunk that is in time by a rounding error may count either way.
    in_time = {first(deadline_ms - near), first(deadline_ms), first(deadline_ms + near)}
    if found.can_meet:
        assert (found.budget, found.steps) in in_time
    else:
        assert None in in_time and found.steps == least
        measured = {name: costs.budgets[name].chunk_ms(least) for name in allowed}
        near_ties = [name for name in allowed if measured[name] <= MARGIN * min(measured.values())]
        assert found.budget == near_ties[-1]
    assert found.expected_ms == pytest.approx(expected(found.budget, found.steps))


@pytest.mark.parametrize("before,step", [(1.6, 1.0), (1.0, 1.6), (1.6, 1.6), (0.7, 1.0)])
def test_one_slow_chunk_changes_no_fastest_budget(before: float, step: float) -> None:
    """A slow part of a chunk belongs to the machine. It must not reorder budgets that cost nearly the same."""
    costs = costs_of({"none": (90, 10), "prune-77.8": (55, 6.6), "prune-88.9": (61, 5)})
    history = RequestHistory()
    for number in range(3):
        found = choose(costs, 10, 10, 5, history=history)
        assert (found.budget, found.steps, found.can_meet) == ("prune-88.9", 5, False), number
        history.add(Prediction(61, 5), before * 61, step * 5, 1)
        assert found.expected_ms > 0.7 * costs.budgets["prune-88.9"].chunk_ms(5)


def test_the_time_up_to_the_tower_is_spent_whatever_it_was() -> None:
    """Large frames take longer: the choice follows, and what is expected of later chunks does not change."""
    clock, history = [5.0], RequestHistory()
    costs = costs_of({"none": (100, 10), "prune-77.8": (50, 8)})
    slower = history.slower.first
    for spent, budget, steps in ((10, "none", 10), (60, "none", 5), (300, "prune-77.8", 5)):
        given = {"began": clock[0], "budget": "none", "most_steps": 10, "least_steps": 5, "frames": 1}
        own = ChunkDeadline(costs, history, deadline_ms=10.1 + slower * 200, now=lambda: clock[0], **given)
        clock[0] += spent / 1e3
        if spent == 60:
            clock[0] += slower * 50 / 1e3 - 0.05
        assert own.choose(3) == (budget, steps)
        before, step = costs.budgets[budget].before_ms, costs.budgets[budget].step_ms
        clock[0] += (before + steps * step) / 1e3
        report = own.report([step] * steps)
        assert report.met == (spent != 300) == report.can_meet
        assert history.recent.first[-1] == pytest.approx(1) and history.recent.token[-1] == pytest.approx(1)


@pytest.mark.parametrize(("frames", "chosen"), [(2, "prune-77.8"), (1, "none")])
def test_fewer_frames_leave_time_for_a_larger_budget(frames: int, chosen: str) -> None:
    budgets = {"none": BudgetCosts(100, 10, 220), "prune-77.8": BudgetCosts(50, 8, 70)}
    costs = ActionCosts("sinkpruner", 2, budgets, place=PLACE, prompt_tokens=20)
    history = RequestHistory()
    given = {"began": time.perf_counter(), "budget": "none", "most_steps": 5, "least_steps": 5}
    own = ChunkDeadline(costs, history, deadline_ms=history.slower.first * 145, frames=frames, **given)
    assert own.choose(20)[0] == chosen


@pytest.fixture(scope="module")
def warm(bundle: Callable[..., Path], photo: Image.Image) -> Policy:
    """A small policy of two cameras with measured costs of one camera's frame."""
    policy = Policy.load(bundle("pi0", budgets=BUDGETS, max_images=2))
    policy.warm_up([photo, None], "pick up the cup", STATE, seconds=0)
    return policy


def act(policy: Policy, photo: Image.Image, **changed: Any) -> ActionReport:
    """A chunk from one camera, within a deadline."""
    options = {"deadline_ms": 60_000, "seed": 1, **changed}
    return policy.act(options.pop("cameras", [photo, None]), "pick up the cup", STATE, **options)


def test_a_chunk_with_time_is_the_one_without_a_deadline(warm: Policy, photo: Image.Image) -> None:
    in_time, plain = act(warm, photo), act(warm, photo, deadline_ms=None)
    assert (in_time.budget, in_time.steps) == (plain.budget, plain.steps) == ("none", warm.facts.steps)
    assert (in_time.actions == plain.actions).all()
    assert plain.deadline is None
    deadline = in_time.deadline
    assert deadline is not None and deadline.met and deadline.can_meet
    assert (deadline.budget, deadline.steps, deadline.deadline_ms) == ("none", warm.facts.steps, 60_000)
    assert in_time.ms["latency"] < deadline.measured_ms
    assert [act(warm, photo, deadline_ms=1, steps=steps).steps for steps in (2, 10)] == [2, FEWEST_STEPS]
    capped = act(warm, photo, budget="prune-88.9").deadline
    assert capped is not None and capped.reason.startswith("the largest budget up to prune-88.9 that is expected")


def test_the_chosen_budget_and_steps_are_what_runs(warm: Policy, photo: Image.Image) -> None:
    """With costs of a slow machine, whose unpruned chunk takes a minute and a step a second."""
    costs = warm.costs
    slow = {"none": (60_000, 1000), "prune-77.8": (10_000, 1000), "prune-88.9": (1000, 1000)}
    own = Policy(warm.bundle, warm.backend)
    own.costs = replace(costs_of(slow), place=own.place)
    own.load_plans("sinkpruner")
    act(own, photo, deadline_ms=None)
    pruned = act(own, photo, deadline_ms=25_800)
    expected = 1.3 * MARGIN
    assert (pruned.budget, pruned.steps, len(pruned.step_ms)) == ("prune-77.8", 8, 8)
    assert pruned.tokens_per_layer[-1] < pruned.visual_tokens
    assert pruned.deadline is not None
    spent = pruned.deadline.expected_ms - 18_000 * expected
    assert pruned.ms["vision"] < spent < 1_200
    assert pruned.deadline.slower == pytest.approx(expected)
    # The chunk was far faster than that: it lowers what is expected of the next.
    assert act(own, photo, deadline_ms=25_800).budget == "none"
    # Other costs begin a new history.
    own.costs = replace(own.costs)
    anew = act(own, photo, deadline_ms=25_800)
    assert (anew.budget, anew.steps) == ("prune-77.8", 8)
    late = act(own, photo, deadline_ms=1, min_steps=3)
    assert (late.budget, late.steps) == ("prune-88.9", 3)
    assert late.deadline is not None and not late.deadline.can_meet and not late.deadline.met
    assert warm.costs is costs


def test_the_first_chunk_and_one_that_loads_a_graph_correct_no_expected_time(
    warm: Policy, photo: Image.Image
) -> None:
    own = Policy(warm.bundle, warm.backend)
    own.costs = warm.costs
    ratios = list[int]()
    for budget in ("none", "prune-88.9", "prune-88.9"):
        act(own, photo, budget=budget)
        own.save_costs()
        assert own._history is not None
        ratios.append(len(own._history[1].recent.first))
    assert ratios == [0, 0, 1]


def test_wrong_deadlines_are_refused_with_a_sentence(warm: Policy, photo: Image.Image) -> None:
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"cameras": [photo] * 2}, DeadlineError, "2 cameras have a frame, and the costs were measured with 1"),
        ({"budget": "retain-64"}, BudgetError, "retain-64"),
        ({"deadline_ms": 0}, UsageError, "deadline_ms is 0, expected milliseconds"),
        ({"deadline_ms": True}, UsageError, "deadline_ms is True"),
        ({"min_steps": 0}, UsageError, "min_steps is 0"),
        ({"min_steps": 4, "steps": 3}, UsageError, "min_steps is 4 and steps 3"),
        ({"min_steps": 4, "deadline_ms": None}, UsageError, "min_steps is for a deadline"),
    ]
    for changed, error, words in wrong:
        with pytest.raises(error, match=words):
            act(warm, photo, **changed)


def test_unknown_costs_are_refused_with_a_sentence(warm: Policy, photo: Image.Image) -> None:
    own = Policy(warm.bundle, warm.backend)
    for costs, words in (
        (None, r"costs of chunks on this machine, .* are not known.*policy\.warm_up"),
        (costs_of({"prune-88.9": (1, 1)}, frames=2), "at budget 'none' are not known, but those .* at prune-88.9"),
        (costs_of({"none": (1, 1)}, "fastv", 2), "'sinkpruner' at budget 'none' are not known, but .* 'fastv'"),
        (costs_of({"none": (2, 1), "prune-50": (1, 1)}), "budget 'prune-50', which the bundle does not have"),
    ):
        if costs is not None:
            own.costs = replace(costs, place=own.place)
        with pytest.raises(DeadlineError, match=words):
            act(own, photo)
    own.costs = costs_of({"none": (2, 1)})
    with pytest.raises(UsageError, match=r"^the costs are of another place: their 'config_sha256' is"):
        act(own, photo)
    own.costs = 3  # type: ignore[assignment]
    with pytest.raises(TypeError, match="costs is 3, expected ActionCosts"):
        act(own, photo)
    with pytest.raises(UsageError, match="seconds is -1"):
        own.warm_up([photo, None], "go", STATE, seconds=-1)


def test_a_warm_up_keeps_its_costs_for_later_processes(
    warm: Policy, photo: Image.Image, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(OtherLoad, "share", lambda self: 0.0)
    policy, began, reported = Policy(warm.bundle, warm.backend), time.time(), set[object]()
    costs = policy.warm_up([photo, photo], "go", STATE, seconds=0, progress=lambda *each: reported.add(each[0]))
    assert reported == {"measuring costs"}
    later = Policy.load(warm.bundle.path)
    deadline = act(later, photo).deadline
    assert ActionCosts.cached(policy.place, "sinkpruner") == costs == policy.costs == later.costs
    assert (list(costs.budgets), costs.frames, costs.place, costs.load) == ([*NAMES], 2, policy.place, 0.0)
    assert costs.measured_at is not None and began <= costs.measured_at <= time.time()
    assert deadline is not None and (deadline.budget, deadline.costs_load) == ("none", 0.0)
    assert ActionCosts.cached(policy.place, "fastv") is None
    write_costs(tmp_path / "costs.json", costs)
    assert read_action_costs(tmp_path / "costs.json", policy.place) == costs


def measured(
    patch: pytest.MonkeyPatch, budgets: tuple[str, ...], times: Callable[[str, int], tuple[float, float]]
) -> tuple[ActionCosts, list[tuple[str, int]]]:
    """The costs by chunks that move the clock, and the chunks: `times` are ms before the steps and of a step.

    A chunk has 7 tokens of text, and 100 or 20 of frames in each layer. The frames and the tower take any time.
    """
    clock, ran = [0.0], list[tuple[str, int]]()
    patch.setattr(time, "perf_counter", lambda: clock[0] / 1e3)

    def act(budget: str, steps: int) -> tuple[float, ActionReport]:
        clock[0] += 100 * len(ran)
        tower, (before, step) = clock[0] / 1e3, times(budget, len(ran))
        clock[0] += before + steps * step
        ran.append((budget, steps))
        layers = [100, 100] if budget == "none" else [30, 10]
        report = ActionReport(None, True, "", budget, steps, 7, 100, layers, {}, [step] * steps, None, ())  # type: ignore[arg-type]
        return tower, report

    return measure_costs(act, "sinkpruner", budgets, 1, MEASURED_STEPS, PLACE, 0.0, lambda *_: None), ran


def test_costs_are_medians_without_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def times(budget: str, chunks: int) -> tuple[float, float]:
        slower = 1000 if chunks < 2 else 1 + chunks // 2
        return 10.0 * slower, (3.0 if budget == "none" else 1.0) * slower

    costs, ran = measured(monkeypatch, ("none", "prune-88.9"), times)
    assert (costs.method, costs.frames, costs.place, costs.prompt_tokens) == ("sinkpruner", 1, PLACE, 7)
    # Three rounds count, whose chunks take 2, 3 and 4 times as long.
    assert ran == [("none", MEASURED_STEPS), ("prune-88.9", MEASURED_STEPS)] * 4
    assert costs.budgets == {
        "none": BudgetCosts(pytest.approx(30), pytest.approx(9), 107),  # type: ignore[arg-type]
        "prune-88.9": BudgetCosts(pytest.approx(30), pytest.approx(3), 27),  # type: ignore[arg-type]
    }


def test_a_smaller_budget_costs_at_most_what_a_larger_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load does not make it seem slower than a larger one. Pruning itself may be slower."""
    ms = {"none": (10.0, 1.0), "prune-66.7": (30.0, 5.0), "prune-80": (25.0, 7.0), "prune-88.9": (28.0, 4.0)}
    found, _ = measured(monkeypatch, tuple(ms), lambda budget, chunks: ms[budget])
    costs = [(round(own.before_ms, 6), round(own.step_ms, 6)) for own in found.budgets.values()]
    assert costs == [(10, 1), (30, 5), (25, 5), (25, 4)]
