"""Costs of chunks that a process leaves for the next one, with their age, their load and recent chunks."""

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
from sinkprune.contract.errors import DeadlineError
from sinkprune.deadlines.costs import ACTION_COSTS, cache_costs, cache_file
from sinkprune.deadlines.policy import MARGIN, OtherLoad

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
    assert ACTION_COSTS.cached(policy.place, "sinkpruner") == costs == policy.costs
    assert (list(costs.budgets), costs.frames, costs.place, costs.load) == (["prune-88.9"], 2, policy.place, 0.0)
    assert costs.measured_at is not None and began <= costs.measured_at <= time.time()


def test_a_later_process_needs_no_warm_up(warm: Policy, photo: Image.Image) -> None:
    policy = Policy.load(warm.bundle.path)
    deadline = in_time(policy, photo)
    assert policy.costs == warm.costs
    assert (deadline.budget, deadline.costs_load) == ("none", 0.0)
    assert deadline.costs_age_s is not None and 0 < deadline.costs_age_s < 3600


def test_costs_of_another_place_are_not_taken(warm: Policy, photo: Image.Image) -> None:
    other = Policy.load(warm.bundle.path, backend="ort-cpu", compute="fp32", threads=2)
    assert other.place != warm.place
    said = r"the costs of chunks on this machine, with ort-cpu in 2 threads, are not known.*sinkprune-act --warm-up"
    with pytest.raises(DeadlineError, match=said):
        in_time(other, photo)


def test_a_process_goes_on_where_the_last_one_saved_its_costs(warm: Policy, photo: Image.Image) -> None:
    first, second = Policy.load(warm.bundle.path), Policy.load(warm.bundle.path)
    for policy in (first, second):
        policy.act([photo, None], "pick up the cup", STATE)
    assert first.save_costs() is None
    assert in_time(first, photo).slower == pytest.approx(UNKNOWN)
    assert first.save_costs() == cache_file(warm.place, "sinkpruner")
    cached = ACTION_COSTS.cached(warm.place, "sinkpruner")
    assert cached is not None and len(cached.recent.first) == len(cached.recent.token) == 1
    assert in_time(second, photo).slower == pytest.approx(UNKNOWN * cached.recent.first[0])
    # Chunks are compared with the costs of their own time.
    first.costs = replace(costs_of(warm))
    assert in_time(first, photo).slower == pytest.approx(UNKNOWN)


def test_costs_that_cannot_be_kept_are_a_warning(warm: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(warm.bundle, warm.backend)
    policy.costs = costs_of(warm)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/nowhere")
    with pytest.warns(CostsWarning, match=rf"written to '{cache_file(warm.place, 'sinkpruner')}', so later runs do"):
        assert policy.save_costs() is None


def test_a_file_of_its_own_is_read(warm: Policy, photo: Image.Image, tmp_path: Path) -> None:
    write_costs(tmp_path / "costs.json", costs_of(warm))
    policy = Policy(warm.bundle, warm.backend)
    policy.costs = read_action_costs(tmp_path / "costs.json", policy.place)
    assert in_time(policy, photo).met


@pytest.mark.parametrize(("load", "said"), [(0.2, ""), (0.6, "took 60 % of the processors, and replace costs")])
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
    assert ACTION_COSTS.cached(warm.place, "sinkpruner") == policy.costs == replace(kept, measured_at=ANY, load=load)


def test_plans_are_loaded_before_a_chunk_needs_them(warm: Policy) -> None:
    policy, seen = Policy(warm.bundle, warm.backend), list[tuple[str, float, float, str]]()
    policy.load_plans("sinkpruner", lambda *each: seen.append(each))
    assert [each[1:] for each in seen] == [(done, 2, "budgets") for done in (0, 1, 2)]
