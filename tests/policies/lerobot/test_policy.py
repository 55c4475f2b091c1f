"""LeRobot's policy class on recorded observations, with a stand-in for LeRobot's base classes.

`batches.npz` has the observations of an episode as LeRobot's processors give them to a policy. The tests of
`make test-lerobot` compare this file with LeRobot.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from conftest import make_once
from sinkprune import Policy, demo
from sinkprune.contract.errors import BudgetError, ImageError, PromptError, UsageError
from sinkprune.demo.robot_table import SIDE, RobotTable
from support.lerobot.episodes import BUDGET, EPISODE, RUN, SEED, episode
from support.lerobot.stand_in import FeatureType, PolicyFeature, RTCConfig, standing_in
from support.models.manifests import name_cameras

MODULE = "sinkprune.policies.lerobot.policy"
CAMERAS = {"table": [SIDE, SIDE], "close": [SIDE, SIDE]}
TABLE, CLOSE = (f"observation.images.{name}" for name in CAMERAS)
Make = Callable[..., Any]
Bundles = Callable[..., Path]
Batches = list[dict[str, Any]]


@pytest.fixture(scope="module")
def module() -> Iterator[ModuleType]:
    """The adapter, on the stand-in."""
    with standing_in():
        yield importlib.import_module(MODULE)
        del sys.modules[MODULE]


@pytest.fixture(scope="module")
def robot(shared_folder: Path) -> Path:
    """The bundle of the pocket robot."""
    from sinkprune.export.command import main as export

    source = Path(demo.__file__).parent / "pocket-robot"

    def write(folder: Path) -> None:
        plans = ["--budgets", BUDGET, "--methods", "sinkpruner,downsample"]
        assert export([str(source), "-o", str(folder), "--max-images", "2", *plans]) == 0

    return make_once(shared_folder / "pocket-robot", write)


@pytest.fixture(scope="module")
def engines(robot: Path) -> Policy:
    return Policy.load(robot, threads=1)


@pytest.fixture(scope="module")
def make(module: ModuleType, robot: Path) -> Make:
    """Return a function that loads a policy of LeRobot, with some fields of its configuration changed."""

    def policy(**changed: Any) -> Any:
        given = {"bundle": str(robot), "cameras": CAMERAS, "budget": BUDGET, "seed": SEED, "threads": 1, **changed}
        return module.SinkprunePolicy(module.SinkpruneConfig(**given))

    return policy


@pytest.fixture(scope="module")
def loaded(make: Make) -> Any:
    return make()


@pytest.fixture(scope="module")
def batches() -> list[dict[str, Any]]:
    """The recorded observations of an episode's chunks."""
    found = list[dict[str, Any]]()
    with np.load(Path(__file__).parent / "batches.npz") as recorded:
        for name, value in recorded.items():
            number, key = name.split("/", 1)
            if int(number) == len(found):
                found.append({})
            found[int(number)][key] = value.tolist() if key == "task" else torch.from_numpy(value)
    return found


def acted(engines: Policy, table: RobotTable, **options: Any) -> np.ndarray:
    """The chunk of the engines alone."""
    frames = options.pop("cameras", table.cameras())
    options = {"budget": BUDGET, "seed": SEED, **options}
    return engines.act(frames, table.instruction, table.state(), **options).actions


def assert_close(actions: Any, expected: Any) -> None:
    """Compare actions of two runs: other places in memory may change the order of a sum."""
    np.testing.assert_allclose(np.asarray(actions), expected, rtol=0, atol=1e-4)


def test_an_episode_s_actions_are_those_of_the_engines(make: Make, engines: Policy, batches: Batches) -> None:
    expected, succeeded = episode(engines)
    assert succeeded and len(batches) == 3 and 2 * RUN < len(expected) <= 3 * RUN
    policy, found = make(n_action_steps=RUN), []
    policy.reset()
    for batch in batches:
        found += [policy.select_action(batch) for _ in range(RUN)]
        # Only the first of these actions has run the engines.
        assert [report.budget for report in policy.reports] == [BUDGET]
    assert all(action.shape == (1, 3) and action.dtype == torch.float32 for action in found)
    assert_close(torch.cat(found)[: len(expected)], np.array(expected))


def test_a_chunk_is_used_up_before_the_next_unless_the_episode_ends(
    make: Make, engines: Policy, batches: Batches
) -> None:
    policy = make()
    first, second = (policy.predict_action_chunk(batch)[0] for batch in batches[:2])
    assert len(first) == engines.facts.chunk and not torch.equal(first, second)
    chosen = [policy.select_action(batches[0])[0], *(policy.select_action(batches[1])[0] for _ in first)]
    assert torch.equal(torch.stack(chosen), torch.cat([first, second[:1]]))
    policy.reset()
    assert torch.equal(policy.select_action(batches[0])[0], first[0])


@pytest.mark.parametrize("names", [("close", "table"), (CLOSE, TABLE), ("-table", CLOSE)])
def test_cameras_are_matched_by_name(names: tuple[str, ...], make: Make, engines: Policy, batches: Batches) -> None:
    policy = make(cameras={name.lstrip("-"): [] if name[0] == "-" else [SIDE, SIDE] for name in names})
    cameras = zip(CAMERAS, RobotTable(EPISODE).cameras(), strict=True)
    frames = [None if f"-{name}" in names else frame for name, frame in cameras]
    there = {f"observation.images.{name.removeprefix('observation.images.')}" for name in names if name[0] != "-"}
    assert policy.config.input_features.keys() == {*there, "observation.state"}
    chunk = policy.predict_action_chunk(batches[0]).numpy()
    assert_close(chunk[0], acted(engines, RobotTable(EPISODE), cameras=frames))
    assert {f"observation.images.{name}" for name in policy.reports[0].camera_names} == there


def test_cameras_without_names_are_in_the_order_of_the_configuration(
    make: Make, robot: Path, engines: Policy, batches: Batches, tmp_path: Path
) -> None:
    table, nameless = RobotTable(EPISODE), str(name_cameras(robot, tmp_path / "nameless"))
    first, second = table.cameras()
    for names, frames in ((("close", "table"), [second, first]), (("-", "close"), [None, second])):
        with pytest.warns(UserWarning, match=rf"their order in 'cameras' counts: {', '.join(names)}\. It"):
            policy = make(bundle=nameless, cameras={name: CAMERAS.get(name, []) for name in names})
        assert_close(policy.predict_action_chunk(batches[0]).numpy()[0], acted(engines, table, cameras=frames))
    with pytest.raises(UsageError, match=r"found 1 camera, and .* exported for 2 cameras"):
        make(bundle=nameless, cameras={"table": [SIDE, SIDE]})


def test_each_observation_of_a_batch_has_its_own_chunk(make: Make, batches: Batches) -> None:
    policy, (one, two, _) = make(), batches
    alone = [policy.predict_action_chunk(one), policy.predict_action_chunk({**two, "task": "pick the red star"})]
    both = {key: torch.cat([one[key], two[key]]) for key in (TABLE, CLOSE, "observation.state")}
    together = policy.predict_action_chunk({**both, "task": [*one["task"], "pick the red star"]})
    assert torch.allclose(together, torch.cat(alone), atol=1e-4) and len(policy.reports) == 2
    assert not torch.equal(together[1:], policy.predict_action_chunk(two))
    assert torch.allclose(policy.predict_action_chunk({**both, "task": one["task"][0]})[:1], alone[0], atol=1e-4)
    assert policy.select_action({**both, "task": one["task"][0]}).shape == (2, 3)


def test_noise_and_options_reach_the_engines(make: Make, engines: Policy, batches: Batches) -> None:
    table, facts = RobotTable(EPISODE), engines.facts
    noise = np.random.default_rng(0).standard_normal((1, facts.chunk, facts.action_dim), np.float32)
    policy = make(budget="none", steps=3)
    expected = acted(engines, table, budget="none", steps=3, seed=None, noise=noise[0])
    assert_close(policy.predict_action_chunk(batches[0], torch.from_numpy(noise))[0], expected)
    assert_close(policy.select_action(batches[0], torch.from_numpy(noise))[0], expected[0])
    assert not np.array_equal(policy.predict_action_chunk(batches[0])[0], expected)
    other = make(method="downsample")
    assert_close(other.predict_action_chunk(batches[0])[0], acted(engines, table, method="downsample"))
    assert not np.array_equal(other.predict_action_chunk(batches[0])[0], acted(engines, table))
    other = make(seed=None)
    chunks = [other.predict_action_chunk(batches[0]) for _ in range(2)]
    assert not torch.equal(*chunks)


LEFT = torch.arange(1.0, 25).reshape(8, 3)


@pytest.mark.parametrize(
    ("options", "held"),
    [
        ({"inference_delay": 3, "execution_horizon": 2}, [LEFT[:2]] * 2),
        ({"inference_delay": 3, "prev_chunk_left_over": torch.stack([LEFT, -LEFT])}, [LEFT[:3], -LEFT[:3]]),
        # LeRobot 0.6 adds zeros up to the horizon. And some action of a chunk is free.
        ({"inference_delay": 4, "prev_chunk_left_over": torch.cat([LEFT[:2], torch.zeros(6, 3)])}, [LEFT[:2]] * 2),
        ({"inference_delay": 20}, [LEFT[:7]] * 2),
        ({"inference_delay": 3, "rtc_config": RTCConfig(execution_horizon=1)}, [LEFT[:1]] * 2),
        ({"inference_delay": 3, "rtc_config": RTCConfig(enabled=False)}, [None] * 2),
        ({"inference_delay": 0}, [None] * 2),
        ({"inference_delay": 3, "prev_chunk_left_over": None}, [None] * 2),
    ],
)
def test_actions_within_the_delay_and_the_horizon_are_held(
    options: dict[str, Any], held: list[Any], loaded: Any, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = list[Any]()

    def act(*observation: Any, held: Any, **options: Any) -> SimpleNamespace:
        given.append(held)
        return SimpleNamespace(actions=np.zeros((8, 3), np.float32))

    monkeypatch.setattr(loaded.engines, "act", act)
    chunking = {"prev_chunk_left_over": LEFT, **options}
    monkeypatch.setattr(loaded.config, "rtc_config", chunking.pop("rtc_config", None))
    both = {key: torch.cat([batches[0][key]] * 2) for key in (TABLE, CLOSE, "observation.state")}
    loaded.predict_action_chunk({**both, "task": "go"}, **chunking)
    for found, expected in zip(given, held, strict=True):
        np.testing.assert_equal(found, expected if expected is None else expected.numpy())


def test_costs_for_a_deadline_are_measured_when_the_policy_is_loaded(
    make: Make, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_up = Policy.warm_up
    monkeypatch.setattr(
        Policy, "warm_up", lambda own, *given, **options: warm_up(own, *given, **{**options, "seconds": 0})
    )
    for deadline_ms, budget, steps in ((60_000, "none", 4), (1, BUDGET, 2)):
        policy = make(budget="none", deadline_ms=deadline_ms, steps=4, min_steps=2)
        assert {*policy.engines.costs.budgets} == {"none", BUDGET}
        policy.select_action(batches[0])
        (report,) = policy.reports
        assert (report.budget, report.steps, report.deadline.deadline_ms) == (budget, steps, deadline_ms)
    pruned = make(method="downsample", deadline_ms=60_000)
    assert (pruned.engines.costs.method, {*pruned.engines.costs.budgets}) == ("downsample", {BUDGET})
    assert make().engines.costs is None


def test_other_observations_are_refused(loaded: Any, batches: Batches) -> None:
    batch = batches[0]
    table, two = batch[TABLE], torch.zeros(2, 2)
    for changed, error, words in (
        ({CLOSE: None}, UsageError, f"found None as '{CLOSE}' of the observation.*{TABLE}.*rename_map"),
        ({"observation.state": batch["observation.state"][0]}, UsageError, r"shape \[2\], expected \[b"),
        ({"observation.state": two}, UsageError, "1 instruction as 'task' for 2 obs"),
        ({"observation.state": two, "task": "go"}, ImageError, "has 1 frame, and the"),
        ({"task": None}, PromptError, "found None as the instruction"),
        ({TABLE: table * 255}, ImageError, "values from .* to 2.*from 0 to 1"),
        ({TABLE: table * np.nan}, ImageError, "values from nan"),
        ({TABLE: table.permute(0, 2, 3, 1)}, ImageError, r"of shape \[1, 96, 96, 3\]"),
        ({TABLE: (table * 255).to(torch.uint8)}, ImageError, "is torch.uint8"),
    ):
        given = {name: value for name, value in {**batch, **changed}.items() if value is not None}
        with pytest.raises(error, match=words):
            loaded.select_action(given)


def test_what_a_policy_does_not_do_is_refused(loaded: Any, make: Make, bundle: Bundles, batches: Batches) -> None:
    left = torch.zeros(2, 8, 3)
    with pytest.raises(UsageError, match=r"the shape \[2, 8, 3\], expected \[n,width\], or \[1,n,width\] for 1 ob"):
        loaded.predict_action_chunk(batches[0], inference_delay=3, prev_chunk_left_over=left)
    with pytest.raises(UsageError, match="no statistics of states and actions"):
        bare = bundle("pi0-bare", budgets=("prune-88.9",))
        make(bundle=str(bare), cameras={"table": [SIDE, SIDE]}, budget="none")
    assert list(loaded.parameters()) == []
    for train in (loaded.config.get_optimizer_preset, loaded.get_optim_params, partial(loaded, batches[0])):
        with pytest.raises(UsageError, match="no gradients"):
            train()


def test_other_configurations_are_refused(make: Make) -> None:
    wide = PolicyFeature(FeatureType.ACTION, (6,))
    for changed, error, words in (
        ({"budget": "prune-50"}, BudgetError, "prune-50"),
        ({"cameras": {**CAMERAS, "close": [SIDE]}}, UsageError, r"camera 'close' has the size \[96\], expected"),
        ({"cameras": {**CAMERAS, "close": [0, SIDE]}}, UsageError, r"camera 'close' has the size \[0, 96\]"),
        ({"n_action_steps": 9}, UsageError, "n_action_steps is 9, expected .* 8"),
        ({"output_features": {"action": wide}}, UsageError, r"'action' .* shape \[6\], and that of .* \[3\]"),
        ({"input_features": {"observation.state": wide}}, UsageError, r"'observation.state' .* \[6\], .* \[2\]"),
    ):
        with pytest.raises(error, match=words):
            make(**changed)


def test_lerobot_loads_a_configuration_that_it_has_read(make: Make, module: ModuleType, batches: Batches) -> None:
    policy = make()
    again = module.SinkprunePolicy.from_pretrained(
        "folder", config=policy.config, dataset_stats={}, dataset_meta=None
    )
    assert not again.training
    assert torch.equal(again.select_action(batches[0]), policy.select_action(batches[0]))
    other = SimpleNamespace(type="act")
    with pytest.raises(UsageError, match="'folder' has a policy of type 'act', expected 'sinkprune'"):
        module.SinkprunePolicy.from_pretrained("folder", config=other)


frames = st.tuples(st.integers(1, 5), st.integers(1, 5)).flatmap(lambda size: arrays(np.uint8, (2, *size, 3)))


@given(frames, st.sampled_from([torch.float32, torch.float64, torch.float16]), st.floats(-4e-4, 4e-4))
def test_a_frame_of_lerobot_is_the_camera_s_picture(
    module: ModuleType, pictures: np.ndarray, dtype: torch.dtype, error: float
) -> None:
    given = (torch.from_numpy(pictures).permute(0, 3, 1, 2).to(torch.float64) / 255 + error).to(dtype)
    for row in range(2):
        np.testing.assert_array_equal(module._frame("camera", given, row), pictures[row])
