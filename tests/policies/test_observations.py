"""Observations that a policy rejects, and what seeds and orders of channels mean."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sinkprune import Pipeline, Policy
from sinkprune.contract.errors import (
    BudgetError,
    ImageError,
    OptionError,
    PromptError,
    UnusualStateWarning,
    UsageError,
)
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.policy_facts import NumberRanges
from sinkprune.policies.observation import (
    normalised_actions,
    normalised_state,
    observed,
    robot_actions,
    unusual_state,
)
from support.models.manifests import change_policy
from support.programs.commands import run

Bundles = Callable[..., Path]

WIDTH, CHUNK, ACTIONS = 5, 5, 4


@pytest.fixture(scope="module")
def policy(bundle: Bundles) -> Policy:
    """A small policy of two cameras, whose state has five numbers."""
    return Policy.load(bundle("pi0", budgets=("prune-88.9",), max_images=2))


def act(policy: Policy, photo: Image.Image, **changed: Any) -> Any:
    """A chunk, with some arguments changed."""
    cameras, state = changed.pop("cameras", [photo, photo]), changed.pop("state", [0.5] * WIDTH)
    return policy.act(cameras, changed.pop("instruction", "pick up the cup"), state, **{"steps": 2, **changed})


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"cameras": ["P"]}, ImageError, "found 1 camera, .* exported for 2 .*None \\(--camera none\\) for a camera"),
        ({"cameras": ["P"] * 3}, ImageError, "found 3 cameras.*--max-images 3"),
        ({"cameras": [None, None]}, ImageError, "no camera has a frame"),
        ({"cameras": ["P", 3]}, ImageError, "found int as the image"),
        ({"cameras": "P"}, ImageError, "found Image as cameras, expected a list"),
        ({"cameras": {"top": None}}, UsageError, "no names of cameras, and cameras were named"),
        ({"state": [0.5] * (WIDTH + 1)}, UsageError, r"the state has the shape \[6\], expected 5 numbers"),
        ({"state": [0.5, np.nan, 0, 0, 0]}, UsageError, "the state has nan at place 2, expected finite numbers"),
        ({"state": [0, 0, 0, 0, -1e39]}, UsageError, r"the state has -1e\+39 at place 5, expected finite numbers of"),
        ({"state": "home"}, UsageError, "the state is 'home', expected 5 numbers"),
        ({"state": np.ma.array([0.5] * WIDTH, mask=[0, 0, 0, 0, 1])}, UsageError, "the state is .*--"),
        ({"state": np.array([0.5 + 1j] * WIDTH)}, UsageError, r"the state is .*0\.5\+1"),
        ({"state": np.arange(WIDTH).astype("datetime64[s]")}, UsageError, "the state is .*1970"),
        ({"state": [10**5000] * WIDTH}, UsageError, "the state is list with a number of more than 80 digits"),
        ({"state": [np.timedelta64(1, "D"), 0, 0, 0, 0]}, UsageError, r"the state is \[np.timedelta64"),
        ({"state": torch.ones(WIDTH, requires_grad=True)}, UsageError, "the state is tensor"),
        ({"noise": np.zeros((CHUNK, 5))}, UsageError, r"noise has the shape \[5, 5\], expected \[5,4\]"),
        ({"noise": np.zeros((CHUNK, ACTIONS)), "seed": 1}, UsageError, "noise and a seed"),
        ({"steps": 0}, UsageError, "steps is 0"),
        ({"seed": -1}, UsageError, "seed is -1"),
        ({"instruction": " "}, PromptError, "the instruction is empty. Name the task"),
        ({"instruction": None}, PromptError, "found None as the instruction"),
        ({"budget": "retain-64"}, BudgetError, "retain-64"),
        ({"budget": 3}, UsageError, "budget is 3, expected a name, as in 'retain-64'"),
        ({"method": None}, UsageError, "method is None, expected a name, as in 'sinkpruner'"),
        ({"observer": 3}, TypeError, "observer is 3, expected an Observer"),
        ({"order": "rbg"}, UsageError, "order is 'rbg'"),
    ],
)
def test_wrong_inputs_are_refused_with_a_sentence(
    changed: dict[str, Any], error: type[Exception], words: str, policy: Policy, photo: Image.Image
) -> None:
    if isinstance(changed.get("cameras"), list):
        changed = {**changed, "cameras": [photo if each == "P" else each for each in changed["cameras"]]}
    elif changed.get("cameras") == "P":
        changed = {**changed, "cameras": photo}
    with pytest.raises(error, match=words):
        act(policy, photo, **changed)


def test_a_seed_repeats_a_chunk(policy: Policy, photo: Image.Image) -> None:
    first, again, other = (act(policy, photo, seed=seed).actions for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.1
    assert np.abs(act(policy, photo).actions - act(policy, photo).actions).max() > 0.1


def test_arrays_of_opencv_give_the_chunk_of_the_picture(policy: Policy, photo: Image.Image) -> None:
    bgr = np.asarray(photo)[..., ::-1]
    expected = act(policy, photo, seed=1).actions
    np.testing.assert_array_equal(act(policy, photo, cameras=[bgr, bgr], order="bgr", seed=1).actions, expected)


def test_an_order_without_arrays_is_told(policy: Policy, photo: Image.Image) -> None:
    with pytest.warns(UserWarning, match="order changed nothing, because no picture is an array"):
        act(policy, photo, order="bgr", steps=1)


def test_times_add_up(policy: Policy, photo: Image.Image) -> None:
    report = act(policy, photo, budget="prune-88.9", steps=3)
    parts = sum(report.ms[name] for name in report.ms if name not in ("select", "latency"))
    assert parts == pytest.approx(report.ms["latency"])
    assert sum(report.step_ms) == pytest.approx(report.ms["expert"])
    assert report.flops.total > report.flops.prefix > 0


def test_each_class_names_the_other(bundle: Bundles) -> None:
    with pytest.raises(UsageError, match=r"is a robot policy \(family 'pi0'\).*sinkprune-act or Policy.load"):
        Pipeline.load(bundle("pi0", budgets=("prune-88.9",), max_images=2))
    with pytest.raises(UsageError, match=r"answers questions .*expected a robot policy.*sinkprune-run"):
        Policy.load(bundle("gqa-112"))
    with pytest.raises(OptionError, match="fit"):
        Policy.load(bundle("pi0", budgets=("prune-88.9",), max_images=2), fit="pad")  # type: ignore[arg-type]


def test_a_state_far_outside_the_training_data_is_told(policy: Policy, photo: Image.Image) -> None:
    facts = policy.facts
    mean, std = np.array(facts.state_mean), np.array(facts.state_std)
    for usual in (mean, mean + 9.5 * std, mean - 9.5 * std):
        act(policy, photo, state=usual)
    for sign in (1, -1):
        far = np.array(mean)
        far[2] += sign * 10.5 * std[2]
        with pytest.warns(UnusualStateWarning, match=r"^the state is far outside .*-10 at place 3\. Check"):
            act(policy, photo, state=far)
    far[1] = mean[1] + 1e6
    numbers = r"^the state is far outside .* beyond 10 or -10 at place 2, 3\. Check its units"
    with pytest.warns(UnusualStateWarning, match=numbers):
        act(policy, photo, state=far)
    without = replace(facts, state_mean=(), state_std=())
    assert unusual_state(without, normalised_state(without, [1e6] * len(without.usual_state))) is None
    ranged = replace(without, state_range=NumberRanges((0.0,) * WIDTH, (1.0,) * WIDTH))
    assert unusual_state(ranged, normalised_state(ranged, [5.4] * WIDTH)) is None
    assert unusual_state(ranged, normalised_state(ranged, [5.6] * WIDTH)) is not None
    with pytest.raises(
        UsageError, match=r"the state has 3e\+38 at place 2, expected numbers that are finite in fp32 w"
    ):
        normalised_state(ranged, [0, 3e38, 0, 0, 0])


def test_a_command_tells_of_the_first_such_state(policy: Policy, photo: Image.Image, tmp_path: Path) -> None:
    (tmp_path / "frames").mkdir()
    for number in range(3):
        photo.save(tmp_path / "frames" / f"{number}.png")
    usual = [*policy.facts.state_mean]
    (tmp_path / "states.json").write_text(
        "".join(f"{json.dumps(line)}\n" for line in (usual, [1e6] * WIDTH, [1e6] * WIDTH))
    )
    options = ("--camera", tmp_path / "frames", "--camera", "none", "--state", tmp_path / "states.json")
    words = ("--instruction", "go", "--steps", 1, "--json", "-")
    outcome = run("sinkprune-act", policy.bundle.path, *options, *words)
    assert outcome.code == 0, outcome.stderr
    (told,) = [line for line in outcome.stderr.splitlines() if "training data" in line]
    assert told.startswith("moment 2: the state is far outside the policy's training data: ")
    assert json.loads(outcome.stdout)["notes"] == [told]


TOP, WRIST, EMPTY = (f"observation.images.{name}" for name in ("top", "wrist", "empty_camera_0"))


@pytest.fixture(scope="module")
def named(policy: Policy) -> Manifest:
    """The manifest of a policy whose cameras have names, as LeRobot gives them."""
    manifest = policy.bundle.manifest
    return replace(manifest, max_images=3, policy=replace(policy.facts, cameras=(TOP, WRIST, EMPTY)))


@pytest.mark.parametrize(
    ("cameras", "names"),
    [
        ({TOP: "t", WRIST: "w", EMPTY: None}, "tw"),
        ({"wrist": "w", EMPTY: None, "top": "t"}, "tw"),
        ({"wrist": "w", "top": "t"}, "tw"),
        ({"empty_camera_0": "e", "wrist": "w", "top": "t"}, "twe"),
        ({"wrist": "w", "top": None}, "w"),
        (["t", None, "e"], "te"),
    ],
)
def test_cameras_are_in_the_order_of_the_bundle_s_names(cameras: Any, names: str, named: Manifest) -> None:
    observation = observed(named, cameras, "go", [0.5] * WIDTH)
    assert observation.cameras == tuple(names)
    of_letter = {"t": TOP, "w": WRIST, "e": EMPTY}
    assert observation.camera_names == tuple(of_letter[letter] for letter in names)


@pytest.mark.parametrize(
    ("cameras", "said"),
    [
        ({"left": "l", "right": "r"}, "found the cameras left, right, expected top, wrist, empty_camera_0. Name"),
        ({"top": "t", "wrist": "w", "gripper": "g"}, "found the cameras top, wrist, gripper, expected"),
        ({"top": "t", "wrist": "w", TOP: "t"}, f"camera '{TOP}' is named twice"),
        ({}, "found the cameras none, expected"),
        ({0: "t", 1: "w"}, "camera 0 is no name"),
    ],
)
def test_other_names_of_cameras_are_refused(cameras: Any, said: str, named: Manifest) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        observed(named, cameras, "go", [0.5] * WIDTH)


@pytest.mark.parametrize(
    "task", ["pick", "pick\n", "pick\n\n", "pick \n", "pick ", "\npick", "pick up\nthe cup", "pick_up\n", "pick\r\n"]
)
def test_an_instruction_ends_in_a_newline_as_in_lerobot(task: str, policy: Policy, photo: Image.Image) -> None:
    observation = observed(policy.bundle.manifest, [photo, None], task, [0.5] * WIDTH)
    prompts = policy._model.prompts
    # LeRobot's Pi0NewLineProcessor
    expected = prompts.tokenizer.encode(task if task.endswith("\n") else f"{task}\n", add_special_tokens=False).ids
    assert prompts.encode(("", observation.prompt)).texts[-1][1:] == expected
    # What a method reads as the question does not depend on the newline either.
    assert observation.instruction == task.removesuffix("\n")


@pytest.mark.parametrize("ranges", [False, True])
def test_relative_actions_are_added_to_the_state_after_their_normalisation_is_undone(
    ranges: bool, policy: Policy
) -> None:
    """LeRobot's order after the model; held actions take the way back. The state has more numbers than an action."""
    random = np.random.default_rng(0)
    low, high = random.uniform(-2, -1, 3), random.uniform(0.5, 2, 3)
    statistics: dict[str, Any] = {
        "action_mean": (),
        "action_std": (),
        "action_range": NumberRanges((*low,), (*high,)),
    }
    if not ranges:
        statistics = {"action_mean": (*low,), "action_std": (*high,), "action_range": None}
    relative = (True, False, True)
    facts = replace(policy.facts, **statistics, relative_actions=relative)
    given = random.standard_normal((1, CHUNK, ACTIONS)).astype(np.float32)
    state = random.standard_normal(WIDTH).astype(np.float32)
    found = robot_actions(facts, given, state)
    for step in range(CHUNK):
        for place in range(3):
            number = float(given[0, step, place])
            if ranges:
                number = (number + 1) / 2 * (high[place] - low[place]) + low[place]
            else:
                number = number * (high[place] + 1e-8) + low[place]
            expected = number + float(state[place]) if relative[place] else number
            assert found[step, place] == pytest.approx(expected, abs=1e-6)
    back = normalised_actions(facts, found[:2], state)
    np.testing.assert_allclose(back[..., :3], given[:, :2, :3], atol=1e-6)
    assert back.shape == (1, 2, ACTIONS) and not back[..., 3:].any()


def test_a_chunk_of_relative_actions_follows_the_measured_state(
    policy: Policy, photo: Image.Image, bundle: Bundles, tmp_path: Path
) -> None:
    relative = (True, False, *[True] * (policy.facts.action_width - 2))
    changed = Policy.load(
        change_policy(
            bundle("pi0", budgets=("prune-88.9",), max_images=2), tmp_path / "relative", relative_actions=relative
        )
    )
    state = np.arange(1.0, WIDTH + 1)
    given = {"seed": 1, "state": state}
    plain, found = (act(each, photo, **given).actions for each in (policy, changed))
    offset = np.where(relative, state[: len(relative)], 0)
    np.testing.assert_allclose(found, plain + offset, atol=1e-5)
    held = plain[:2] + 0.3
    plain, found = (
        act(each, photo, **given, held=own).actions for each, own in ((policy, held), (changed, held + offset))
    )
    np.testing.assert_allclose(found, plain + offset, atol=1e-5)
