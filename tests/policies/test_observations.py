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
from sinkprune.policies.observation import normalised_state, observed, unusual_state
from support.models.manifests import change_policy
from support.programs.commands import succeed

Bundles = Callable[..., Path]

WIDTH, CHUNK, ACTIONS = 5, 5, 4


@pytest.fixture(scope="module")
def plain(bundle: Bundles) -> Path:
    return bundle("pi0", budgets=("prune-88.9",), max_images=2)


@pytest.fixture(scope="module")
def policy(plain: Path) -> Policy:
    """A small policy of two cameras, whose state has five numbers."""
    return Policy.load(plain)


def act(policy: Policy, photo: Image.Image, **changed: Any) -> Any:
    """A chunk, with some arguments changed."""
    cameras, state = changed.pop("cameras", [photo, photo]), changed.pop("state", [0.5] * WIDTH)
    return policy.act(cameras, changed.pop("instruction", "pick up the cup"), state, **{"steps": 2, **changed})


def test_wrong_inputs_are_refused_with_a_sentence(policy: Policy, photo: Image.Image) -> None:
    noise = np.zeros((CHUNK, ACTIONS))
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"cameras": [photo]}, ImageError, r"found 1 camera, .* exported for 2 .*None \(--camera none\) for a"),
        ({"cameras": [None, None]}, ImageError, "no camera has a frame"),
        ({"cameras": [photo, 3]}, ImageError, "found int as the image"),
        ({"cameras": photo}, ImageError, "found Image as cameras, expected a list"),
        ({"cameras": {"top": None}}, UsageError, "no names of cameras, and cameras were named"),
        ({"state": [0.5] * (WIDTH + 1)}, UsageError, r"the state has the shape \[6\], expected 5 numbers"),
        ({"state": [0.5, np.nan, 0, 0, 0]}, UsageError, "the state has nan at place 2, expected finite numbers"),
        ({"state": [0, 0, 0, 0, -1e39]}, UsageError, r"the state has -1e\+39 at place 5, expected finite numbers of"),
        ({"state": "home"}, UsageError, "the state is 'home', expected 5 numbers"),
        ({"state": np.ma.array([0.5] * WIDTH, mask=[0, 0, 0, 0, 1])}, UsageError, "the state is .*--"),
        ({"state": [10**5000] * WIDTH}, UsageError, "the state is list with a number of more than 80 digits"),
        ({"state": torch.ones(WIDTH, requires_grad=True)}, UsageError, "the state is tensor"),
        ({"noise": noise[:, :3]}, UsageError, r"noise has the shape \[5, 3\], expected \[5,4\]"),
        ({"noise": noise, "seed": 1}, UsageError, "noise and a seed"),
        ({"steps": 0}, UsageError, "steps is 0"),
        ({"instruction": " "}, PromptError, "the instruction is empty. Name the task"),
        ({"budget": "retain-64"}, BudgetError, "retain-64"),
        ({"budget": 3}, UsageError, "budget is 3, expected a name, as in 'retain-64'"),
        ({"observer": 3}, TypeError, "observer is 3, expected an Observer"),
        ({"order": "rbg"}, UsageError, "order is 'rbg'"),
    ]
    for changed, error, words in wrong:
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
    with pytest.warns(UserWarning, match="order changed nothing, because no picture is an array"):
        act(policy, photo, order="bgr", steps=1)


def test_times_add_up(policy: Policy, photo: Image.Image) -> None:
    report = act(policy, photo, budget="prune-88.9", steps=3)
    parts = sum(report.ms[name] for name in report.ms if name not in ("select", "latency"))
    assert parts == pytest.approx(report.ms["latency"])
    assert sum(report.step_ms) == pytest.approx(report.ms["expert"])
    assert report.flops.total > report.flops.prefix > 0


def test_each_class_names_the_other(bundle: Bundles, plain: Path) -> None:
    with pytest.raises(UsageError, match=r"is a robot policy \(family 'pi0'\).*sinkprune-act or Policy.load"):
        Pipeline.load(plain)
    with pytest.raises(UsageError, match=r"answers questions .*expected a robot policy.*sinkprune-run"):
        Policy.load(bundle("gqa-112"))
    with pytest.raises(OptionError, match="fit"):
        Policy.load(plain, fit="pad")  # type: ignore[arg-type]


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
    with pytest.warns(UnusualStateWarning, match="at place 2, 3"):
        act(policy, photo, state=far)
    without = replace(facts, state_mean=(), state_std=())
    assert unusual_state(without, normalised_state(without, [1e6] * len(without.usual_state))) is None
    ranged = replace(without, state_range=NumberRanges((0.0,) * WIDTH, (1.0,) * WIDTH))
    assert unusual_state(ranged, normalised_state(ranged, [5.4] * WIDTH)) is None
    assert unusual_state(ranged, normalised_state(ranged, [5.6] * WIDTH)) is not None
    with pytest.raises(UsageError, match=r"the state has 3e\+38 at place 2, expected numbers that are finite"):
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
    outcome = succeed("sinkprune-act", policy.bundle.path, *options, *words)
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


def test_other_names_of_cameras_are_refused(named: Manifest) -> None:
    for cameras, said in (
        ({"left": "l", "right": "r"}, "found the cameras left, right, expected top, wrist, empty_camera_0. Name"),
        ({"top": "t", "wrist": "w", TOP: "t"}, f"camera '{TOP}' is named twice"),
        ({0: "t", 1: "w"}, "camera 0 is no name"),
    ):
        with pytest.raises(UsageError, match=re.escape(said)):
            observed(named, cameras, "go", [0.5] * WIDTH)  # type: ignore[arg-type]


@pytest.mark.parametrize("task", ["pick", "pick\n\n", "pick ", "\npick", "pick up\nthe cup", "pick\r\n"])
def test_an_instruction_ends_in_a_newline_as_in_lerobot(task: str, policy: Policy, photo: Image.Image) -> None:
    observation = observed(policy.bundle.manifest, [photo, None], task, [0.5] * WIDTH)
    prompts = policy._model.prompts
    # LeRobot's Pi0NewLineProcessor
    expected = prompts.tokenizer.encode(task if task.endswith("\n") else f"{task}\n", add_special_tokens=False).ids
    assert prompts.encode(("", observation.prompt)).texts[-1][1:] == expected
    # What a method reads as the question does not depend on the newline either.
    assert observation.instruction == task.removesuffix("\n")


def test_a_chunk_of_relative_actions_follows_the_measured_state(
    policy: Policy, photo: Image.Image, plain: Path, tmp_path: Path
) -> None:
    """Also held actions: the state is added after the normalisation is undone."""
    relative = (True, False, *[True] * (policy.facts.action_width - 2))
    changed = Policy.load(change_policy(plain, tmp_path / "relative", relative_actions=relative))
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
