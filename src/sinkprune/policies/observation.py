"""What a robot policy acts on, checked before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any, TypeVar

import numpy as np

from sinkprune.contract.checks import WholeNumber, counted, format_value, is_number, type_name, warn_user
from sinkprune.contract.errors import ImageError, PromptError, UnitsWarning, UnusualStateWarning, UsageError
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.policy_facts import CAMERA_PREFIX, NumberRanges, PolicyFacts
from sinkprune.contract.precision import Array
from sinkprune.runtime.families.policies import state_prompt
from sinkprune.runtime.steps.channel_order import ordered
from sinkprune.runtime.steps.pictures import PictureLike
from sinkprune.runtime.steps.request import check_picture, check_texts

Cameras = Sequence[PictureLike | None] | Mapping[str, PictureLike | None]
"""The last frame of each camera, None for a camera without one: by name, or in the order of the policy's training."""
_NEVER_A_FRAME = f"{CAMERA_PREFIX}empty_camera_"
"""The start of the names that LeRobot gives to `empty_cameras`, which had no frames in training."""
_Value = TypeVar("_Value")
STEPS = WholeNumber("steps", 1, 1000)
"""Denoising steps of a chunk."""
_UNUSUAL = 10
"""In standard deviations of the training data, or in halves of its range. A mix-up of units is larger."""
SEED = WholeNumber("seed", 0, 2**63 - 1)
"""The seed of a chunk's noise."""


@dataclass(frozen=True, eq=False)
class Observation:
    """The frames of a robot's cameras, its instruction and its state, with the noise that a chunk begins with."""

    cameras: tuple[PictureLike, ...]
    """The frames of the cameras that have one, in the order of the policy's training."""
    camera_names: tuple[str, ...] | None
    """The names of these cameras; None if the policy has none."""
    instruction: str
    prompt: str
    """What the prompt has as text: the instruction, and the state where it is part of the prompt."""
    state: Array
    """[1,1,state_dim] fp32: normalised, clipped where the training clipped it, and zeros after the robot's own
    numbers."""
    measured: Array
    """[width] fp32: the state in the robot's units."""
    noise: Array
    """[1,chunk,action_dim] fp32."""
    steps: int
    held: Array
    """[1,n,action_dim] fp32: the first actions of the chunk, normalised, which denoising continues; there may be
    none."""


def observed(
    manifest: Manifest,
    cameras: Cameras,
    instruction: str,
    state: Sequence[float] | Array,
    *,
    order: str = "rgb",
    steps: int | None = None,
    seed: int | None = None,
    noise: Array | None = None,
    held: Sequence[Sequence[float]] | Array | None = None,
) -> Observation:
    """Return a checked observation; raises `ImageError`, `PromptError` and `UsageError`.

    Warns with `UnusualStateWarning` of a state that is far outside the training data, and with `UnitsWarning` if
    states or actions stay normalised.
    """
    if not isinstance(instruction, str):
        raise PromptError(
            f"found {type_name(instruction)} as the instruction, expected a str, as in 'pick up the cup'."
        )
    if not instruction.strip():
        raise PromptError("the instruction is empty. Name the task, as in 'pick up the cup'.")
    check_texts((instruction,), 0)
    policy = manifest.acting
    if policy.expert is None:
        _check_no_denoising(policy, steps=steps, noise=noise, held=held)
    names, given = _frames(manifest, cameras)
    frames = ordered(given, order)
    for frame in frames:
        check_picture(frame)
    if noise is not None and seed is not None:
        raise UsageError("found noise and a seed, expected one of them: the seed draws the noise. Leave one out.")
    shape = (policy.chunk, policy.action_dim)
    if noise is None:
        random = np.random.default_rng(None if seed is None else SEED.check(seed))
        drawn = random.standard_normal((1, *shape), np.float32)
    else:
        drawn = _floats("noise", noise, shape, f"[{policy.chunk},{policy.action_dim}] of them")[None]
    count = policy.steps if steps is None else STEPS.check(steps)
    normalised = normalised_state(policy, state)
    # The chat template ends the line. LeRobot's `pi0_new_line_processor` does only if the task does not.
    instruction = instruction.removesuffix("\n")
    instruction = instruction.lower() if policy.lowercase else instruction
    prompt = state_prompt(policy, instruction, normalised) if policy.state_in_prompt else instruction
    if said := unusual_state(policy, normalised):
        warn_user(said, UnusualStateWarning)
    if policy.units_note:
        warn_user(policy.units_note, UnitsWarning)
    if policy.clips_state:
        normalised = np.clip(normalised, -1, 1)
    measured = np.asarray(state, np.float32)
    first = normalised_actions(policy, held, measured)
    return Observation(frames, names, instruction, prompt, normalised, measured, drawn, count, first)


def _check_no_denoising(policy: PolicyFacts, **given: Any) -> None:
    """Raise `UsageError` for what a policy without an expert cannot use. Its chunks repeat, so any seed does."""
    for name, value in given.items():
        if value is not None and not (name == "steps" and value == policy.steps):
            raise UsageError(
                f"{name} is given, and this policy denoises nothing: its decoder alone makes a chunk. Leave "
                f"{name} out."
            )


def normalised_state(policy: PolicyFacts, state: Sequence[float] | Array) -> Array:
    """Return [1,1,state_dim] fp32 of a robot's state; raises `UsageError`.

    As in transformers' PI0Processor: less the mean, over the standard deviation, then zeros. Or as in LeRobot's
    `NormalizerProcessorStep`: each number's range becomes -1 to 1.
    """
    width = len(policy.usual_state)
    if width and not np.size(state):
        raise UsageError(
            f"no state was given, expected {counted(width, 'number')} as in the policy's training. Add it (--state)."
        )
    given = values = _floats("state", state, (width,), f"{counted(width, 'number')} as in the policy's training")
    with np.errstate(over="ignore"):
        values = _normalised(values, policy.state_range, policy.state_mean, policy.state_std)
    _check_finite("state", given, values, "numbers that are finite in fp32 when they are normalised")
    return np.pad(values, (0, policy.state_dim - width))[None, None]


def unusual_state(policy: PolicyFacts, state: Array) -> str | None:
    """Return sentences about the numbers of a normalised state that are far outside the training data.

    None without such numbers. A checkpoint without statistics has none.
    """
    if not (policy.state_mean or policy.state_range):
        return None
    far = [str(index + 1) for index in np.flatnonzero(np.abs(state) > _UNUSUAL)]
    if not far:
        return None
    return (
        f"the state is far outside the policy's training data: normalised, it is beyond {_UNUSUAL} or -{_UNUSUAL} at "
        f"place {', '.join(far)}. Check its units, for example degrees for radians, and the order of its numbers."
    )


def robot_actions(policy: PolicyFacts, actions: Array, state: Array) -> Array:
    """Return [chunk,width] fp32 in the robot's units, of the expert's `actions` [1,chunk,action_dim].

    Relative numbers are added to those of `state` [width], the robot's own, after their normalisation is undone.
    """
    found = actions[0, :, : policy.action_width]
    if policy.action_range:
        low, extent = _extents(policy.action_range)
        found = (found + np.float32(1)) * extent / np.float32(2) + low
    elif policy.action_mean:
        mean, std = (np.asarray(each, np.float32) for each in (policy.action_mean, policy.action_std))
        found = found * (std + np.float32(1e-8)) + mean
    return found + _origin(policy, state) if policy.relative_actions else found


def _origin(policy: PolicyFacts, state: Array) -> Array:
    """Return [width] fp32: the number of the state that each number of an action is relative to, or 0."""
    relative = np.array(policy.relative_actions)
    return np.where(relative, state[: len(relative)], np.float32(0))


def normalised_actions(policy: PolicyFacts, actions: Sequence[Sequence[float]] | Array | None, state: Array) -> Array:
    """Return [1,n,action_dim] fp32, as the expert gives them, of `actions` [n,width] in the robot's units.

    The inverse of `robot_actions`, with zeros after the robot's own numbers. None stands for no actions. Raises
    `UsageError` for other shapes, for more than a chunk, and for numbers that are not finite.
    """
    width, given = policy.action_width, [] if actions is None else actions
    if not len(given):
        return np.zeros((1, 0, policy.action_dim), np.float32)
    if len(given) >= policy.chunk:
        raise UsageError(f"{len(given)} actions are held, expected fewer than the {policy.chunk} of a chunk.")
    if policy.most_held and len(given) > policy.most_held:
        raise UsageError(f"{len(given)} actions are held, expected {policy.most_held} at most, as in the training.")
    values = _floats("held", given, (len(given), width), f"actions of {counted(width, 'number')} each")
    if policy.relative_actions:
        values = values - _origin(policy, state)
    values = _normalised(values, policy.action_range, policy.action_mean, policy.action_std)
    return np.pad(values, ((0, 0), (0, policy.action_dim - width)))[None]


def _normalised(values: Array, ranges: NumberRanges | None, mean: Sequence[float], std: Sequence[float]) -> Array:
    if ranges:
        low, extent = _extents(ranges)
        return np.float32(2) * (values - low) / extent - np.float32(1)
    if mean:
        return (values - np.asarray(mean, np.float32)) / (np.asarray(std, np.float32) + np.float32(1e-8))
    return values


def _extents(ranges: NumberRanges) -> tuple[Array, Array]:
    """Return the lower ends and the lengths of ranges, fp32. LeRobot divides by 1e-8 where a range has no length."""
    low, high = (np.asarray(each, np.float32) for each in (ranges.low, ranges.high))
    return low, np.where(high == low, np.float32(1e-8), high - low)


def camera_key(name: str) -> str:
    """Return LeRobot's key of a camera's frames: 'wrist' is short for 'observation.images.wrist'."""
    return name if name.startswith("observation.") else CAMERA_PREFIX + name


def short_name(name: str) -> str:
    """Return the shortest name of a camera that `camera_key` completes."""
    return name.removeprefix(CAMERA_PREFIX)


def in_trained_order(policy: PolicyFacts, cameras: Mapping[str, _Value]) -> list[_Value | None]:
    """Return the values of `cameras` in the order of the policy's training, by the names in the bundle.

    A camera that had no frames in training may be left out, as in LeRobot, and is None. Raises `UsageError` for
    unknown, missing and doubled names, and for a policy whose cameras have no names.
    """
    keys = [*map(camera_key, policy.cameras or ())]
    if not keys:
        raise UsageError(
            "the policy's checkpoint has no names of cameras, and cameras were named. Give frames without names, in "
            "the order of the policy's training."
        )
    given = dict[str, _Value]()
    for name, value in cameras.items():
        if not isinstance(name, str) or camera_key(name) in given:
            wrong = "is named twice" if isinstance(name, str) else "is no name"
            raise UsageError(f"camera {format_value(name)} {wrong}, expected each name of a camera once.")
        given[camera_key(name)] = value
    missing = [key for key in keys if key not in given and not key.startswith(_NEVER_A_FRAME)]
    if missing or given.keys() - keys:
        raise UsageError(
            f"found the cameras {_listed(given) or 'none'}, expected {_listed(keys)}. Name each of them; one without "
            "a frame has None (NAME=none for --camera, [] in LeRobot's configuration)."
        )
    return [given.get(key) for key in keys]


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(short_name(key) for key in keys)


def _frames(manifest: Manifest, cameras: Cameras) -> tuple[tuple[str, ...] | None, list[PictureLike]]:
    names = manifest.acting.cameras
    if isinstance(cameras, Mapping):
        given: list[PictureLike | None] = in_trained_order(manifest.acting, cameras)
    elif isinstance(cameras, (list, tuple)):
        given = list(cameras)
    else:
        raise ImageError(
            f"found {type_name(cameras)} as cameras, expected a list with the frame of each camera, or a dict of "
            "them by name."
        )
    if len(given) != manifest.max_images:
        known = f": {', '.join(names)}" if names else ""
        again = f"; or export the checkpoint again with --max-images {len(given)}" if given and not names else ""
        raise ImageError(
            f"found {counted(len(given), 'camera')}, and the policy was exported for "
            f"{counted(manifest.max_images, 'camera')}{known}. Give a frame for each, and None (--camera none) for a "
            f"camera without one{again}."
        )
    frames = [frame for frame in given if frame is not None]
    if not frames:
        raise ImageError("no camera has a frame, expected one at least.")
    seen = zip(names or (), given, strict=False)
    return tuple(name for name, frame in seen if frame is not None) if names else None, frames


def _floats(name: str, given: Any, shape: tuple[int, ...], expected: str) -> Array:
    try:
        found = np.asarray(given)
        # Fractions, decimals and large whole numbers are objects.
        objects = found.dtype.kind == "O" and all(is_number(one, Number) for one in found.ravel())
        if np.ma.is_masked(given) or not (objects or found.dtype.kind in "biuf"):
            raise TypeError("texts, times, and masked and complex numbers, which numpy would convert")
        with np.errstate(over="ignore"):
            values = np.asarray(given, np.float32)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        # A tensor with a gradient is a RuntimeError.
        raise UsageError(f"the {name} is {format_value(given)}, expected {expected}.") from error
    if values.shape != shape:
        raise UsageError(f"the {name} has the shape {list(values.shape)}, expected {expected}.")
    _check_finite(name, found, values, "finite numbers of fp32")
    return values


def _check_finite(name: str, given: Array, values: Array, expected: str) -> None:
    for place in np.flatnonzero(~np.isfinite(values))[:1]:
        found = float(given.ravel()[place])
        raise UsageError(f"the {name} has {found:g} at place {place + 1}, expected {expected}.")
