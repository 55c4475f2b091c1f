"""Costs of chunks: how they are measured, and what a process leaves for the next one."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest
from PIL import Image

from sinkprune import ActionCosts, ActionDeadline, CostsWarning, Policy, read_action_costs, write_costs
from sinkprune.deadlines.costs import BudgetCosts, Place, cache_costs, cache_file
from sinkprune.deadlines.policy import MARGIN
from sinkprune.policies.deadline import MEASURED_STEPS, measure_costs
from sinkprune.policies.report import ActionReport
from sinkprune.runtime.profiling.other_load import OtherLoad

STATE = [0.5] * 5
UNKNOWN = MARGIN * 1.3


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The user's cache folder, empty, on a machine that does nothing else."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(OtherLoad, "share", lambda self: 0.0)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def measured(bundle: Callable[..., Path], photo: Image.Image) -> Policy:
    """A small policy of two cameras that measured its costs, and could not keep them."""
    policy = Policy.load(bundle("pi0", budgets=("prune-77.8", "prune-88.9"), max_images=2))
    with warnings.catch_warnings():
        # Other programs may keep this machine busy.
        warnings.simplefilter("ignore", CostsWarning)
        policy.warm_up([photo, None], "pick up the cup", STATE, seconds=0)
    policy.costs = replace(costs_of(policy), load=0.0)
    return policy


@pytest.fixture
def warm(measured: Policy) -> Policy:
    """The same, whose costs are in the cache folder."""
    assert cache_costs(costs_of(measured)) == cache_file(measured.place, "sinkpruner")
    return measured


def costs_of(policy: Policy) -> ActionCosts:
    assert policy.costs is not None
    return policy.costs


def in_time(policy: Policy, photo: Image.Image) -> ActionDeadline:
    """How a chunk met a deadline that it always meets."""
    deadline = policy.act([photo, None], "pick up the cup", STATE, deadline_ms=60_000).deadline
    assert deadline is not None
    return deadline


def test_a_warm_up_keeps_its_costs(warm: Policy, photo: Image.Image) -> None:
    policy, began = Policy(warm.bundle, warm.backend), time.time()
    costs = policy.warm_up([photo, photo], "go", STATE, budget="prune-88.9", seconds=0)
    assert ActionCosts.cached(policy.place, "sinkpruner") == costs == policy.costs
    assert (list(costs.budgets), costs.frames, costs.place, costs.load) == (["prune-88.9"], 2, policy.place, 0.0)
    assert costs.measured_at is not None and began <= costs.measured_at <= time.time()


def test_a_later_process_needs_no_warm_up(warm: Policy, photo: Image.Image) -> None:
    policy = Policy.load(warm.bundle.path)
    deadline = in_time(policy, photo)
    assert policy.costs == warm.costs
    assert (deadline.budget, deadline.costs_load) == ("none", 0.0)
    assert deadline.costs_age_s is not None and 0 < deadline.costs_age_s < 3600


def test_a_file_of_its_own_is_read(warm: Policy, photo: Image.Image, tmp_path: Path) -> None:
    write_costs(tmp_path / "costs.json", costs_of(warm))
    policy = Policy(warm.bundle, warm.backend)
    policy.costs = read_action_costs(tmp_path / "costs.json", policy.place)
    assert in_time(policy, photo).met


@pytest.mark.parametrize(("load", "said"), [(0.2, ""), (0.6, "took 60 % of the processors")])
def test_costs_that_are_measured_under_load_are_a_warning(
    load: float, said: str, warm: Policy, photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = costs_of(warm)
    monkeypatch.setattr(OtherLoad, "share", lambda self: load)
    monkeypatch.setattr("sinkprune.policies.policy.measure_costs", lambda *_: kept)
    policy = Policy(warm.bundle, warm.backend)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        policy.warm_up([photo, None], "go", STATE)
    assert [each.category for each in caught] == [CostsWarning] * bool(said)
    assert all(said in str(each.message) and each.filename == __file__ for each in caught)
    assert ActionCosts.cached(warm.place, "sinkpruner") == policy.costs == replace(kept, measured_at=ANY, load=load)


PLACE = Place("0" * 64, (), "fp32", "fp32", "ort-cpu", "fp32", 2, "a machine")


def chunk_of(budget: str, step_ms: list[float]) -> ActionReport:
    """A chunk that only measuring costs reads: 7 tokens of text, and 100 or 20 of frames in each layer."""
    layers = [100, 100] if budget == "none" else [30, 10]
    return ActionReport(None, True, "", budget, len(step_ms), 7, 100, layers, {}, step_ms, None, ())  # type: ignore[arg-type]


def test_costs_are_medians_without_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk takes 10 and 3 times its number of milliseconds, by a clock that chunks move."""
    clock, ran = [0.0], list[tuple[str, int]]()
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0] / 1e3)

    def act(budget: str, steps: int) -> tuple[float, ActionReport]:
        # The frames and the tower take any time.
        clock[0] += 100 * len(ran)
        tower, times = clock[0] / 1e3, 1000 if len(ran) < 2 else 1 + len(ran) // 2
        ran.append((budget, steps))
        step = [times * (3.0 if budget == "none" else 1.0)] * steps
        clock[0] += 10 * times + sum(step)
        return tower, chunk_of(budget, step)

    costs = measure_costs(act, "sinkpruner", ("none", "prune-88.9"), 1, MEASURED_STEPS, PLACE, 0.0, lambda *_: None)
    assert (costs.method, costs.frames, costs.place, costs.prompt_tokens) == ("sinkpruner", 1, PLACE, 7)
    budgets = costs.budgets
    assert ran[:4] == [("none", MEASURED_STEPS), ("prune-88.9", MEASURED_STEPS)] * 2
    # Three rounds count, whose chunks take 2, 3 and 4 times as long.
    assert len(ran) == 8
    assert budgets["none"] == BudgetCosts(pytest.approx(30), pytest.approx(9), 107)  # type: ignore[arg-type]
    assert budgets["prune-88.9"] == BudgetCosts(pytest.approx(30), pytest.approx(3), 27)  # type: ignore[arg-type]
    assert budgets["none"].chunk_ms(10) == pytest.approx(120)


def test_a_smaller_budget_costs_at_most_what_a_larger_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load does not make it seem slower than a larger one. Pruning itself may be slower."""
    clock, ms = [0.0], {"none": (10, 1), "prune-66.7": (30, 5), "prune-80": (25, 7), "prune-88.9": (28, 4)}
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0] / 1e3)

    def act(budget: str, steps: int) -> tuple[float, ActionReport]:
        (before, step), tower = ms[budget], clock[0] / 1e3
        clock[0] += before + steps * step
        return tower, chunk_of(budget, [float(step)] * steps)

    found = measure_costs(act, "sinkpruner", tuple(ms), 1, MEASURED_STEPS, PLACE, 0.0, lambda *_: None).budgets
    assert {name: (round(own.before_ms, 6), round(own.step_ms, 6)) for name, own in found.items()} == {
        "none": (10, 1),
        "prune-66.7": (30, 5),
        "prune-80": (25, 5),
        "prune-88.9": (25, 4),
    }
