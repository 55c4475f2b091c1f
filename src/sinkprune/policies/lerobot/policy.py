"""LeRobot's policy type `sinkprune`: its configuration, its policy class and its processors.

LeRobot finds these three by their names and by this module. Importing it registers the type, and needs LeRobot.
Tensors are LeRobot's: this module uses their own functions, and does not import torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from lerobot.configs.policies import PreTrainedConfig
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.policies.rtc.configuration_rtc import RTCConfig

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.checks import WholeNumber, counted, format_value, type_name, warn_user
from sinkprune.contract.errors import ImageError, UsageError
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.precision import Array
from sinkprune.policies.observation import camera_key, in_trained_order
from sinkprune.policies.policy import Policy
from sinkprune.policies.report import ActionReport

Tensor = Any
"""A tensor of torch, which LeRobot brings along."""
STATE, ACTION, TASK = "observation.state", "action", "task"
_ROUNDING = 1e-3
"""By how much resizing may leave the range of pixels, 0 to 1. It changes no pixel of 8 bits."""
_WARM_UP = "pick up the object"
"""An instruction of a usual length, on which costs depend little."""
_NO_TRAINING = (
    "a policy of type 'sinkprune' runs engines, which have no gradients. Train the checkpoint, and export it."
)


@PreTrainedConfig.register_subclass("sinkprune")
@dataclass
class SinkpruneConfig(PreTrainedConfig):  # type: ignore[misc]
    """What a policy of type `sinkprune` runs: a bundle at a budget. Other fields are LeRobot's own."""

    input_features: dict[str, PolicyFeature] | None = field(default_factory=dict)
    """The frames of `cameras`, and the state."""
    bundle: str = ""
    """The folder of the bundle, or of engines."""
    cameras: dict[str, list[int]] = field(default_factory=dict)
    """Height and width of each camera's frames, by the camera's name in the bundle, in any order. An empty list is a
    camera without a frame. LeRobot's server resizes frames to this size. For a bundle without names, names are those
    of LeRobot, in the order of the policy's training."""
    method: str = "sinkpruner"
    budget: str = UNPRUNED
    """With `deadline_ms`, the largest budget that may run."""
    steps: int | None = None
    """Denoising steps of a chunk; with `deadline_ms`, the most (default: the checkpoint's)."""
    min_steps: int | None = None
    deadline_ms: float | None = None
    """Milliseconds to a chunk of actions. Loading the policy then measures what chunks cost on this machine."""
    seed: int | None = None
    """Draws the noise that each chunk begins with, the same for all (default: new noise for each)."""
    n_action_steps: int | None = None
    """How many actions of a chunk `select_action` returns before the next chunk (default: all)."""
    backend: str | None = None
    threads: int | None = None
    rtc_config: RTCConfig | None = None
    """LeRobot's real-time chunking. Of its fields, `enabled` and `execution_horizon` count."""
    rtc_training_max_delay: int = 0
    """The most held actions of the policy's training. The policy sets it; LeRobot after 0.6.1 reads it."""
    device: str | None = "cpu"
    """Where LeRobot keeps observations and actions. The backend decides where engines run."""

    def __post_init__(self) -> None:
        """Declare the frames of the cameras as input features; raises `UsageError` for sizes."""
        super().__post_init__()
        for name, size in self.cameras.items():
            if size and (len(size) != 2 or min(size) < 1):
                raise UsageError(
                    f"camera '{name}' has the size {format_value(size)}, expected [height, width] in pixels, or [] "
                    "for a camera without a frame."
                )
        sizes = {camera_key(name): (3, *size) for name, size in self.cameras.items() if size}
        frames = {key: PolicyFeature(FeatureType.VISUAL, size) for key, size in sizes.items()}
        given = (self.input_features or {}).items()
        self.input_features = frames | {name: one for name, one in given if one.type is not FeatureType.VISUAL}

    observation_delta_indices = action_delta_indices = reward_delta_indices = None
    """The policy reads the last observation, and is not trained."""

    def validate_features(self) -> None:
        """Do nothing: the policy compares features with the bundle when it loads the bundle."""

    def get_optimizer_preset(self) -> NoReturn:
        """Raise `UsageError`: the policy is not trained."""
        raise UsageError(_NO_TRAINING)

    def get_scheduler_preset(self) -> None:
        """Return None: the policy is not trained."""


class SinkprunePolicy(PreTrainedPolicy):  # type: ignore[misc]
    """A bundle of a robot policy, as LeRobot's policy. It has no parameters; engines have the weights."""

    config_class = SinkpruneConfig
    name = "sinkprune"

    def __init__(self, config: SinkpruneConfig, **dataset: Any) -> None:
        """Load the bundle that `config` names; LeRobot's facts of a `dataset` are not needed.

        Raises `UsageError` for a bundle without statistics, and for cameras, features and numbers that differ from
        the bundle's; and what `Policy.load` and `Policy.warm_up` raise.
        """
        super().__init__(config)
        self.engines = Policy.load(config.bundle, backend=config.backend, threads=config.threads)
        facts, manifest = self.engines.facts, self.engines.bundle.manifest
        config.rtc_training_max_delay = facts.most_held or 0
        manifest.plan(config.method, config.budget)
        if not facts.in_robots_units:
            raise UsageError(
                f"'{config.bundle}' has no statistics of states and actions, so its actions are not in the robot's "
                "units. Export a checkpoint with statistics (docs/policies.md)."
            )
        self._cameras = _cameras(config, manifest)
        state, action = len(facts.usual_state), facts.action_width
        config.input_features = _with_feature(config.input_features, STATE, FeatureType.STATE, state)
        config.output_features = _with_feature(config.output_features, ACTION, FeatureType.ACTION, action)
        chunk = facts.chunk if config.n_action_steps is None else config.n_action_steps
        self._actions = WholeNumber("n_action_steps", 1, facts.chunk).check(chunk)
        self.reports: list[ActionReport] = []
        """The reports of the last chunks, one for each observation of the batch: times, budget, kept tokens."""
        if config.deadline_ms is not None:
            # Here, because no robot waits while LeRobot loads a policy.
            self._warm_up()
        self.reset()

    @classmethod
    def from_pretrained(
        cls, pretrained_name_or_path: str | Path, *, config: SinkpruneConfig | None = None, **options: Any
    ) -> SinkprunePolicy:
        """Load the policy of a folder that `write_policy` wrote. `options` are LeRobot's.

        Raises what the class raises.
        """
        if config is None:
            config = PreTrainedConfig.from_pretrained(pretrained_name_or_path, **options)
            options = {}
        if not isinstance(config, SinkpruneConfig):
            raise UsageError(
                f"'{pretrained_name_or_path}' has a policy of type '{config.type}', expected 'sinkprune'."
            )
        return cls(config, **options).eval()

    def supports_rtc(self) -> bool:
        """Return that `predict_action_chunk` takes the last chunk's remaining actions; LeRobot 0.6 asks for it."""
        return True

    def reset(self) -> None:
        """Drop the remaining actions of the chunk, at the start of an episode."""
        self._queue: deque[Tensor] = deque()

    def select_action(self, batch: Mapping[str, Any], noise: Tensor | None = None) -> Tensor:
        """Return the next action [batch,width], in the robot's units; runs a chunk if the last one is used up.

        Takes and raises what `predict_action_chunk` does.
        """
        if not self._queue:
            self._queue.extend(self.predict_action_chunk(batch, noise)[:, : self._actions].unbind(1))
        return self._queue.popleft()

    def predict_action_chunk(
        self,
        batch: Mapping[str, Any],
        noise: Tensor | None = None,
        *,
        inference_delay: int | None = None,
        prev_chunk_left_over: Tensor | None = None,
        execution_horizon: int | None = None,
    ) -> Tensor:
        """Return chunks of actions [batch,chunk,width] fp32, in the robot's units, on the device of the state.

        `batch` has RGB frames [batch,3,height,width] with values from 0 to 1 as 'observation.images.NAME', the state
        [batch,width] in the robot's units as 'observation.state', and the instructions as 'task', one or one for
        each. Observations run one after another. `noise` [batch,chunk,action_dim] begins the chunks.

        `prev_chunk_left_over` [n,width] or [batch,n,width] has the actions of the last chunk that did not run yet, in
        the robot's units. The first `inference_delay` of them run before this chunk arrives, and the chunk begins
        with them: `Policy.act` holds them. LeRobot's own policies also guide later actions, up to the first
        `execution_horizon` (default: that of `rtc_config`), by gradients. Here, later actions are free.

        Raises `UsageError` for missing keys and other shapes, `ImageError` for frames, and what `Policy.act` raises.
        """
        states, config = _get(batch, STATE), self.config
        names = ("method", "budget", "steps", "min_steps", "deadline_ms")
        if states.ndim != 2:
            raise UsageError(f"'{STATE}' has the shape {list(states.shape)}, expected [batch,width].")
        tasks = _tasks(batch, len(states))
        held = self._held(len(states), inference_delay, prev_chunk_left_over, execution_horizon)
        self.reports = [
            self.engines.act(
                self._frames(batch, row),
                tasks[row],
                _numbers(states[row]),
                **{name: getattr(config, name) for name in names},
                seed=config.seed if noise is None else None,
                noise=None if noise is None else _numbers(noise[row]),
                held=held[row],
            )
            for row in range(len(states))
        ]
        return states.float().new_tensor(np.stack([report.actions for report in self.reports]))

    def forward(self, batch: Mapping[str, Any]) -> NoReturn:
        """Raise `UsageError`: the policy is not trained."""
        raise UsageError(_NO_TRAINING)

    def get_optim_params(self) -> NoReturn:
        """Raise `UsageError`: the policy is not trained."""
        raise UsageError(_NO_TRAINING)

    def _save_pretrained(self, save_directory: Path, state_dict: object = None) -> None:
        self.config._save_pretrained(save_directory)

    def _frames(self, batch: Mapping[str, Any], row: int) -> list[Array | None]:
        return [_frame(key, _get(batch, key), row) if size else None for key, size in self._cameras]

    def _held(self, batch: int, delay: int | None, left_over: Tensor | None, horizon: int | None) -> list[Any]:
        """Return for each chunk of a `batch` the actions [n,width] that are held, or None."""
        chunking = self.config.rtc_config
        if left_over is None or not delay or (chunking is not None and not chunking.enabled):
            return [None] * batch
        if horizon is None:
            horizon = delay if chunking is None else chunking.execution_horizon
        given = _numbers(left_over if left_over.ndim == 3 else left_over[None])
        if given.ndim != 3 or len(given) not in (1, batch):
            raise UsageError(
                f"prev_chunk_left_over has the shape {list(left_over.shape)}, expected [n,width], or "
                f"[{batch},n,width] for {counted(batch, 'observation')}."
            )
        facts = self.engines.facts
        # LeRobot 0.6 adds rows of zeros up to the horizon. They are no actions.
        rows = np.flatnonzero(given.any(axis=(0, 2)))
        real = 1 + int(rows[-1]) if len(rows) else 0
        count = max(0, min(delay, horizon, real, facts.most_held or facts.chunk - 1))
        return [*np.broadcast_to(given[:, :count], (batch, count, given.shape[2]))]

    def _warm_up(self) -> None:
        frames = [np.zeros((*size, 3), np.uint8) if size else None for _, size in self._cameras]
        state = self.engines.facts.usual_state
        self.engines.warm_up(frames, _WARM_UP, state, budget=self.config.budget, method=self.config.method)


def make_sinkprune_pre_post_processors(
    config: SinkpruneConfig, dataset_stats: Mapping[str, Any] | None = None
) -> tuple[Any, Any]:
    """Return LeRobot's pipelines before and after the policy, which change no value.

    They add a batch dimension, rename keys if LeRobot is given other names, and move tensors. The engines normalise
    the state and the actions with the statistics in the bundle, so `dataset_stats` are not used.
    """
    from lerobot.processor import (
        AddBatchDimensionProcessorStep,
        DeviceProcessorStep,
        PolicyProcessorPipeline,
        RenameObservationsProcessorStep,
    )
    from lerobot.processor.converters import policy_action_to_transition, transition_to_policy_action
    from lerobot.utils.constants import POLICY_POSTPROCESSOR_DEFAULT_NAME, POLICY_PREPROCESSOR_DEFAULT_NAME

    # LeRobot's commands override the renaming and the device, and fail if a pipeline lacks these steps.
    before = [
        RenameObservationsProcessorStep(rename_map={}),
        AddBatchDimensionProcessorStep(),
        DeviceProcessorStep(device=config.device),
    ]
    return (
        PolicyProcessorPipeline(steps=before, name=POLICY_PREPROCESSOR_DEFAULT_NAME),
        PolicyProcessorPipeline(
            steps=[DeviceProcessorStep(device="cpu")],
            name=POLICY_POSTPROCESSOR_DEFAULT_NAME,
            to_transition=policy_action_to_transition,
            to_output=transition_to_policy_action,
        ),
    )


def _cameras(config: SinkpruneConfig, manifest: Manifest) -> list[tuple[str, list[int] | None]]:
    """Return LeRobot's key of each camera and the size of its frames, in the order of the policy's training."""
    given, names = config.cameras, manifest.acting.cameras
    if names:
        return [*zip(map(camera_key, names), in_trained_order(manifest.acting, given), strict=True)]
    if len(given) != manifest.max_images:
        raise UsageError(
            f"found {counted(len(given), 'camera')}, and '{config.bundle}' was exported for "
            f"{counted(manifest.max_images, 'camera')}. Name all in 'cameras', with [] for one without a frame."
        )
    warn_user(
        f"'{config.bundle}' has no names of cameras, so their order in 'cameras' counts: {', '.join(given)}. It "
        "must be that of the policy's training."
    )
    return [(camera_key(name), size) for name, size in given.items()]


def _with_feature(features: dict[str, Any] | None, name: str, kind: Any, width: int) -> dict[str, Any]:
    """Return LeRobot's features with one of the bundle; raises `UsageError` for one of another width."""
    own = PolicyFeature(kind, (width,))
    found = (features or {}).get(name, own)
    if tuple(found.shape) != own.shape:
        raise UsageError(
            f"'{name}' of LeRobot has the shape {list(found.shape)}, and that of the bundle [{width}]. Use the robot "
            "or the data set that the policy was trained with."
        )
    return {**(features or {}), name: own}


def _get(batch: Mapping[str, Any], key: str) -> Tensor:
    found: Tensor = batch.get(key)
    if not hasattr(found, "new_tensor"):
        there = ", ".join(sorted(batch)) or "nothing"
        raise UsageError(
            f"found {type_name(found)} as '{key}' of the observation, expected a tensor. The observation has: "
            f"{there}. Name the robot's cameras as the policy's, or give LeRobot a rename_map."
        )
    return found


def _tasks(batch: Mapping[str, Any], count: int) -> list[Any]:
    tasks = batch.get(TASK)
    listed = list(tasks) if isinstance(tasks, (list, tuple)) else [tasks] * count
    if len(listed) != count:
        raise UsageError(
            f"found {counted(len(listed), 'instruction')} as 'task' for {counted(count, 'observation')}, expected "
            "one for each, or one string for all."
        )
    return listed


def _frame(name: str, frames: Tensor, row: int) -> Array:
    """Return uint8 [height,width,3] of a frame of [batch,3,height,width] from 0 to 1; raises `ImageError`."""
    expected = "expected fp32 [batch,3,height,width] from 0 to 1, as LeRobot gives RGB frames"
    if frames.ndim != 4 or frames.shape[1] != 3 or not frames.is_floating_point():
        raise ImageError(f"'{name}' is {frames.dtype} of shape {list(frames.shape)}, {expected}.")
    if row >= len(frames):
        raise ImageError(f"'{name}' has {counted(len(frames), 'frame')}, and the batch has more states, {expected}.")
    pixels = _numbers(frames[row])
    if not (pixels.min() >= -_ROUNDING and pixels.max() <= 1 + _ROUNDING):
        raise ImageError(f"'{name}' has values from {pixels.min():g} to {pixels.max():g}, {expected}.")
    return (pixels * 255).round().astype(np.uint8).transpose(1, 2, 0)


def _numbers(tensor: Tensor) -> Array:
    return tensor.detach().float().cpu().numpy()
