"""Checkpoints of policies in LeRobot's form, read as if transformers had written them.

LeRobot's config.json has a `type`, and names variants of Gemma instead of their sizes. Two pipelines surround the
model. Every step and each of its settings is read or rejected.
Statistics are those of the normalisers, or up to version 0.3 tensors of the model (lerobot.processor.pipeline,
lerobot.processor.normalize_processor and lerobot.policies.pi0).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import closing
from math import prod
from pathlib import Path
from typing import Annotated, Any, TypedDict

import numpy as np

from sinkprune.contract.checks import Bounds, format_value
from sinkprune.contract.errors import CheckpointError, UsageError
from sinkprune.contract.manifest import Number, Side
from sinkprune.contract.precision import Array
from sinkprune.export.checkpoint.folder import (
    Name,
    SafetensorsWeights,
    file_of,
    has_entry,
    open_shard,
    read_fields,
    read_json,
)
from sinkprune.export.checkpoint.presets import PRESETS

POLICIES = {"pi0": "pi0", "pi05": "pi0.5", "pi0_fast": "pi0-fast"}
"""The presets of the policies that are read, by LeRobot's `type`."""
TOKENIZER = "google/paligemma-3b-pt-224"
"""The tokenizer that LeRobot loads from the hub."""
VARIANTS: dict[str, dict[str, int]] = {
    "gemma_2b": {"hidden_size": 2048, "intermediate_size": 16384},
    "gemma_300m": {"hidden_size": 1024, "intermediate_size": 4096},
}
"""The sizes in which variants of Gemma differ (openpi, models/gemma.py)."""
STATE, ACTION = "observation.state", "action"

_MOST_STATISTICS = 4096
_IDENTITY = "IDENTITY"
_MODES = {
    _IDENTITY: {},
    "MEAN_STD": {"mean": "mean", "std": "std"},
    "MIN_MAX": {"min": "low", "max": "high"},
    "QUANTILES": {"q01": "low", "q99": "high"},
    "QUANTILE10": {"q10": "low", "q90": "high"},
}
"""LeRobot's statistics of each way to normalise, and their names in processor_config.json."""
_KINDS = ("STATE", "VISUAL", "ACTION", "ENV", "REWARD", "LANGUAGE")
"""LeRobot's types of features."""
_FORMER_MODES = {"VISUAL": _IDENTITY, "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
"""How LeRobot up to 0.3 normalises features of each type by default."""
_BEFORE, _AFTER = "policy_preprocessor.json", "policy_postprocessor.json"
_RENAMING, _TOKENIZING = "rename_observations_processor", "tokenizer_processor"
_NORMALISER, _UNNORMALISER = "normalizer_processor", "unnormalizer_processor"
_RELATIVITY = _RELATIVE, _ABSOLUTE = "relative_actions_processor", "absolute_actions_processor"
_PROMPTS = {
    "pi0": "pi0_new_line_processor",
    "pi05": "pi05_prepare_state_tokenizer_processor_step",
    "pi0_fast": "pi0_fast_prepare_state_tokenizer_processor_step",
}
"""The step that writes the text of the prompt, by LeRobot's `type`."""
_ORDERS = {
    "pi0": ((_RENAMING, _RELATIVE, _NORMALISER), (_PROMPTS["pi0"], _TOKENIZING)),
    **{kind: ((_RENAMING, _RELATIVE, _NORMALISER, _PROMPTS[kind], _TOKENIZING),) for kind in ("pi05", "pi0_fast")},
}
"""The steps before the model whose order changes what the model gets: each comes once, in this order."""
_FORMER_TENSORS = {STATE: "normalize_inputs.buffer_observation_state.", ACTION: "unnormalize_outputs.buffer_action."}
"""Where the weights of LeRobot up to 0.3 have statistics."""
_ACTIONS = "action_tokenizer_processor"
"""The step that tokenizes actions in the training of pi0-FAST."""
_ANYWHERE = {
    _BEFORE: ("to_batch_processor", "device_processor", _ACTIONS),
    _AFTER: ("to_batch_processor", "device_processor"),
}
"""Steps that change no number with the settings below."""
_SETTINGS: dict[str, dict[str, tuple[Any, ...]]] = {
    _RENAMING: {"rename_map": ()},
    "to_batch_processor": {},
    "device_processor": {"device": (), "float_dtype": (None, "float32", "float")},
    _RELATIVE: {"enabled": (), "exclude_joints": (), "action_names": ()},
    _ABSOLUTE: {"enabled": ()},
    _PROMPTS["pi0"]: {},
    **{_PROMPTS[kind]: {"task_key": ("task",), "max_state_dim": ()} for kind in ("pi05", "pi0_fast")},
    _ACTIONS: {
        **dict.fromkeys(("action_tokenizer_name", "trust_remote_code", "max_action_tokens"), ()),
        **dict.fromkeys(("fast_skip_tokens", "paligemma_tokenizer_name", "allow_truncation"), ()),
    },
    _TOKENIZING: {
        **dict.fromkeys(("tokenizer_name", "max_length", "truncation"), ()),
        "task_key": ("task",),
        "padding_side": ("right",),
        "padding": ("max_length",),
    },
    _NORMALISER: {"eps": (1e-8,), "features": (), "norm_map": (), "normalize_observation_keys": ()},
    _UNNORMALISER: {"eps": (1e-8,), "features": (), "norm_map": (), "normalize_observation_keys": ()},
}
"""The settings of each step, with the expected values of those that are not read and change numbers."""

_Dimension = Annotated[int, Bounds(1, 1 << 12)]
_Period = Annotated[Number, Bounds(1e-6, 1e6)]


class _Feature(TypedDict):
    type: Name
    shape: Annotated[list[Annotated[int, Bounds(1, 1 << 20)]], Bounds(0, 8)]


class _Switches(TypedDict, total=False):
    """Settings that change what a policy computes. All are false by default, and must be."""

    adapt_to_pi_aloha: bool | None
    use_delta_joint_actions_aloha: bool | None
    use_peft: bool | None
    use_visual_memory: bool | None
    use_proprioceptive_memory: bool | None


class PolicyFields(TypedDict, total=False):
    """Fields of a policy that LeRobot and transformers name alike."""

    chunk_size: Annotated[int, Bounds(1, 1 << 10)]
    max_state_dim: _Dimension
    max_action_dim: _Dimension
    num_inference_steps: Annotated[int, Bounds(1, 1 << 10)]
    min_period: _Period
    max_period: _Period
    rtc_training_max_delay: Annotated[int, Bounds(0, 1 << 10)]


class _Fields(PolicyFields, _Switches, total=False):
    type: Name
    n_obs_steps: Annotated[int, Bounds(1, 1)]
    input_features: dict[str, _Feature] | None
    output_features: dict[str, _Feature] | None
    normalization_mapping: dict[str, Name] | None
    paligemma_variant: Name
    action_expert_variant: Name
    num_steps: Annotated[int, Bounds(1, 1 << 10)]
    image_resolution: Annotated[list[Side], Bounds(2, 2)]
    resize_imgs_with_padding: Annotated[list[Side], Bounds(2, 2)]
    empty_cameras: Annotated[int, Bounds(0, 64)]
    tokenizer_max_length: Annotated[int, Bounds(1, 1 << 14)]
    rtc_config: dict[str, Any] | None
    use_relative_actions: bool | None
    # Of pi0-FAST
    action_tokenizer_name: Name
    temperature: Annotated[Number, Bounds(0, 1e6)]
    max_decoding_steps: Annotated[int, Bounds(1, 1 << 12)]
    fast_skip_tokens: Annotated[int, Bounds(0, 1 << 16)]
    validate_action_token_prefix: bool


_Statistics = tuple[str, Mapping[str, Array]]
"""How a feature is normalised, and its statistics by name."""


class _StepConfig(TypedDict, total=False):
    norm_map: dict[str, Name]
    features: dict[str, _Feature]
    normalize_observation_keys: list[Name] | None
    rename_map: dict[str, Name]
    tokenizer_name: Name
    max_length: Annotated[int, Bounds(1, 1 << 14)]
    enabled: bool
    exclude_joints: list[Annotated[str, Bounds(0, 200)]]
    action_names: list[Name] | None


_Step = TypedDict(
    "_Step",
    {
        "registry_name": Name,
        "class": Name,
        "config": dict[str, Any],
        "state_file": Name,
        "artifacts": dict[str, Name],
    },
    total=False,
)


class _Steps(TypedDict):
    steps: Annotated[list[_Step], Bounds(0, 100)]


def translated_config(source: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of transformers' form for LeRobot's; raises `CheckpointError`."""
    known = _read(source, config)
    made = copy.deepcopy(PRESETS[POLICIES[known["type"]]])
    prefix, expert = known.get("paligemma_variant", "gemma_2b"), known.get("action_expert_variant", "gemma_300m")
    for name, variant in (("paligemma_variant", prefix), ("action_expert_variant", expert)):
        if variant not in VARIANTS:
            raise _error(source, f"{name} is '{variant}', expected {' or '.join(VARIANTS)}", _DIFFERENT)
    vlm, width = made.get("vlm_config", made), VARIANTS[prefix]["hidden_size"]
    vlm["text_config"] |= VARIANTS[prefix]
    vlm["projection_dim"] = vlm["vision_config"]["projection_dim"] = width
    vlm["vision_config"]["image_size"] = _side(source, known)
    if "dit_config" in made:
        made["dit_config"] |= VARIANTS[expert]
    else:
        action = (known.get("output_features") or {}).get(ACTION)
        most = known.get("max_action_dim", 32)
        made["action_dim"] = _width(source, ACTION, action["shape"], most) if action else most
    if "num_steps" in known:
        made["num_inference_steps"] = known["num_steps"]
    return {**made, **{name: known[name] for name in PolicyFields.__annotations__ if name in known}}


def lerobot_pixels(side: int) -> dict[str, Any]:
    """Return the settings of LeRobot's pictures in squares of `side` pixels."""
    return {
        "image_processor_type": "resize_with_pad_torch",
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "resample": 2,
        "pad_size": {"height": side, "width": side},
    }


def translated_files(
    source: str, folder: Path, config: Mapping[str, Any], action_tokenizer: str | None = None
) -> dict[str, dict[str, Any]]:
    """Return the JSON files of transformers' form for a folder with LeRobot's `config`; raises `CheckpointError`.

    `action_tokenizer` is a local folder or a hub name with the FAST tokenizer, for pi0-FAST; `UsageError` for others.
    """
    known = _read(source, config)
    pixels, policy = lerobot_pixels(_side(source, known)), _policy(source, folder, known)
    if "resize_imgs_with_padding" in known:
        pixels["image_processor_type"] = "resize_with_pad"
    if known["type"] == "pi0_fast":
        from sinkprune.export.checkpoint.fast_tokenizer import fast_settings

        own = _step_of(folder, _ACTIONS).get("artifacts", {}).get("action_tokenizer_name")
        policy["fast"] = fast_settings(source, folder, known, own, action_tokenizer)
    elif action_tokenizer:
        raise UsageError(f"--action-tokenizer is for pi0-FAST, and '{source}' is none. Leave it out.")
    return {
        "config.json": translated_config(source, config),
        "preprocessor_config.json": pixels,
        "processor_config.json": policy,
    }


def tokenizer_folder(source: str, folder: Path) -> Path:
    """Return the folder of the tokenizer of a folder in LeRobot's form, whose pipelines are known; raises
    `CheckpointError`.

    LeRobot loads the tokenizer from the hub. Versions after 0.6 save it next to the pipelines, as an artifact.
    """
    step = _step_of(folder, _TOKENIZING)
    name = step.get("config", {}).get("tokenizer_name", TOKENIZER)
    if "tokenizer_name" in step.get("artifacts", {}):
        return file_of(folder, name)
    if not has_entry(folder, "tokenizer.json"):
        raise _error(
            source,
            "it has no tokenizer.json, because LeRobot loads its tokenizer from the hub",
            f"Accept its licence on the hub, and add --tokenizer {name}; or give a local folder with this tokenizer.",
        )
    return folder


def _step_of(folder: Path, kind: str) -> Mapping[str, Any]:
    """Return the step `kind` before the model in a folder whose pipelines are known; empty if there is none."""
    steps = read_json(folder, _BEFORE)["steps"] if has_entry(folder, _BEFORE) else []
    return next((one for one in steps if one.get("registry_name") == kind), {})


def check_folder(source: str, folder: Path, config: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` for a folder around a policy of LeRobot, with an adapter of one, or of openpi.

    `config` is its config.json without a `model_type`, empty if there is none.
    """
    names = ("*/pretrained_model/config.json", "checkpoints/*/pretrained_model/config.json")
    # The link `last`, or where it was not copied the largest number of steps.
    inner = [path.parent for name in names for path in sorted(folder.glob(name))]
    if inner and not config:
        export = Path(source) / inner[-1].relative_to(folder)
        raise _error(source, "it is a folder of lerobot-train around a policy", f"Export {export}.")
    if has_entry(folder, "adapter_config.json") and "type" in config:
        base = read_json(folder, "adapter_config.json").get("base_model_name_or_path") or "BASE"
        raise _error(
            source,
            f"it is an adapter (PEFT, LoRA) of the policy {format_value(base)}, and no whole checkpoint",
            "Merge both with merge_and_unload of peft, and export the result (docs/convert-policies.md).",
        )
    jax = not config and has_entry(folder, "params")
    if jax or ("action_horizon" in config and "type" not in config):
        raise _error(
            source,
            f"it is a checkpoint of openpi in {'JAX' if jax else 'PyTorch'} form. Names of cameras and conversions "
            "of actions, for example relative ones, are in openpi's training code and not in the folder",
            "Export a policy in LeRobot's form, such as lerobot/pi0_base or lerobot/pi05_base, or convert this one "
            "(docs/convert-policies.md).",
        )


_DIFFERENT = "Such policies are not supported yet."
_AGAIN = "Download the checkpoint again."


def _error(source: str, found: str, remedy: str) -> CheckpointError:
    return CheckpointError(f"checkpoint '{source}': {found}. {remedy}")


def _read(source: str, config: Mapping[str, Any]) -> Any:
    known = read_fields(_Fields, config, f"checkpoint '{source}': config.json")
    kind = known.get("type")
    if kind not in POLICIES:
        raise _error(source, f"it is a policy of LeRobot's type '{kind}'", f"Supported types: {', '.join(POLICIES)}.")
    for name in _Switches.__annotations__:
        if known.get(name):
            raise _error(source, f"{name} is true, expected false", _DIFFERENT)
    if (chunking := known.get("rtc_config")) is not None and chunking.get("enabled", True):
        raise _error(
            source,
            "rtc_config is enabled, so LeRobot has each chunk continue the last one",
            "Write null as rtc_config in config.json to export it without real-time chunking.",
        )
    return known


def _side(source: str, known: Mapping[str, Any]) -> int:
    sides: Sequence[int] = known.get("image_resolution") or known.get("resize_imgs_with_padding") or (224, 224)
    if sides[0] != sides[1]:
        raise _error(source, f"image_resolution is {list(sides)}, expected a square", _DIFFERENT)
    return sides[0]


def _policy(source: str, folder: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the processor_config.json of transformers' form: names of cameras, statistics, the longest prompt."""
    cameras, longest, relative = _cameras(source, known), known.get("tokenizer_max_length"), list[bool]()
    most = {STATE: known.get("max_state_dim", 32), ACTION: known.get("max_action_dim", 32)}
    features = {**(known.get("input_features") or {}), **(known.get("output_features") or {})}
    widths = {
        key: _width(source, key, features[key]["shape"], limit) if key in features else limit
        for key, limit in most.items()
    }
    modes = _checked_modes(source, "config.json", known.get("normalization_mapping") or {})
    former = "resize_imgs_with_padding" in known and not known.get("use_relative_actions")
    if former and not any(has_entry(folder, name) for name in (_BEFORE, _AFTER)):
        found = _former_statistics(source, folder, {**_FORMER_MODES, **modes}, cameras)
    else:
        before = _Pipeline(source, folder, _BEFORE, _ORDERS[known["type"]], _PROMPTS[known["type"]])
        after = _Pipeline(source, folder, _AFTER, ((_UNNORMALISER, _ABSOLUTE),))
        relative = _relative_actions(source, before, after, known.get("use_relative_actions"), widths[ACTION])
        for camera in cameras:
            mode, frames = before.statistics(modes, camera, "VISUAL")
            if mode != _IDENTITY and frames:
                raise _normalised_frames(source, camera, mode)
        found = {STATE: before.statistics(modes, STATE, "STATE"), ACTION: after.statistics(modes, ACTION, "ACTION")}
        cameras = _robots_names(source, cameras, before.config(_RENAMING).get("rename_map", {}))
        longest = before.config(_TOKENIZING).get("max_length", longest)
    return {
        "cameras": cameras,
        **_normalisation(source, "state", *found[STATE], widths[STATE], most[STATE]),
        **_normalisation(source, "actions", *found[ACTION], widths[ACTION], widths[ACTION]),
        **({"most_prompt_tokens": longest} if longest else {}),
        **({"actions_relative": relative} if any(relative) else {}),
    }


def _cameras(source: str, known: Mapping[str, Any]) -> list[str]:
    """Return the cameras in the order in which the model takes them. Those without a frame come last and are masked,
    so that their order changes nothing.
    """
    features = known.get("input_features") or {}
    names = [key for key, feature in features.items() if feature["type"] == "VISUAL"]
    empty = (f"observation.images.empty_camera_{number}" for number in range(known.get("empty_cameras", 0)))
    names += [name for name in empty if name not in names]
    if not names:
        raise _error(
            source,
            "it names no cameras, because input_features of config.json has no feature of the type VISUAL. Base "
            "checkpoints such as lerobot/pi0 are published so",
            "Fine-tune it with lerobot-train, which writes the cameras of your data set, and export the result. Or "
            "export lerobot/pi0_base or lerobot/pi05_base, which name their cameras.",
        )
    return names


def _robots_names(source: str, cameras: Sequence[str], renaming: Mapping[str, str]) -> list[str]:
    """Return the names of `cameras` in the observations of a robot, which LeRobot's first step renames."""
    names = []
    for camera in (STATE, *cameras):
        old = [one for one, new in renaming.items() if new == camera]
        if len(old) > 1 or (not old and camera in renaming):
            given = f"the names {', '.join(old)}" if old else "no name"
            raise _error(source, f"rename_map in {_BEFORE} has {given} for '{camera}', expected one", _DIFFERENT)
        names.append(old[0] if old else camera)
    return names[1:]


def _width(source: str, key: str, shape: Sequence[int], most: int) -> int:
    if len(shape) != 1 or shape[0] > most:
        raise _error(source, f"feature '{key}' has the shape {list(shape)}, expected one of up to {most}", _AGAIN)
    return shape[0]


class _Pipeline:
    """The steps of the pipeline `name`, by their kinds."""

    def __init__(
        self, source: str, folder: Path, name: str, orders: Sequence[Sequence[str]], needed: str | None = None
    ) -> None:
        """Read the steps, and check their settings against `_SETTINGS`.

        The steps of each of `orders` come once, in its order; `needed` is one of them. Raises `CheckpointError`.
        """
        self._source, self._folder, self._name = source, folder, name
        if not has_entry(folder, name):
            again = "Copy it from the pretrained_model folder of the training, or download the checkpoint again."
            raise _error(source, f"it has no {name}, without which LeRobot does not run it either", again)
        found: dict[str, _Step] = {}
        for step in read_fields(_Steps, read_json(folder, name), f"checkpoint '{source}': {name}")["steps"]:
            kind = step.get("registry_name") or step.get("class", "without a name")
            ordered = any(kind in order for order in orders)
            if not ordered and kind not in _ANYWHERE[name]:
                raise self._error(f"the step '{kind}', which is not known there")
            if ordered and kind in found:
                raise self._error(f"the step '{kind}' twice")
            for setting, value in step.get("config", {}).items():
                expected = _SETTINGS[kind].get(setting)
                has = f"the step '{kind}' in {name} has the setting '{setting}'"
                if expected is None:
                    raise _error(source, f"{has}, which is not known", _DIFFERENT)
                if expected and value not in expected:
                    wanted = " or ".join(map(format_value, expected))
                    raise _error(source, f"{has} {format_value(value)}, expected {wanted}", _DIFFERENT)
            if "state_file" in step and kind not in (_NORMALISER, _UNNORMALISER):
                raise _error(source, f"the step '{kind}' in {name} has a state_file, which is not known", _DIFFERENT)
            found[kind] = step
        # A step that is off changes nothing.
        on = [kind for kind in found if found[kind].get("config", {}).get("enabled", kind not in _RELATIVITY)]
        for order in orders:
            right = [kind for kind in order if kind in on]
            if right != [kind for kind in found if kind in right]:
                raise self._error(f"its steps in another order than {', '.join(right)}")
        if needed and needed not in found:
            raise self._error(f"no step '{needed}'")
        self._steps = found

    def config(self, kind: str) -> _StepConfig:
        """Return the settings of the step `kind`; none without the step."""
        config = self._steps[kind].get("config", {}) if kind in self._steps else {}
        return read_fields(_StepConfig, config, f"checkpoint '{self._source}': {self._name}: config of '{kind}'")

    def statistics(self, configured: Mapping[str, str], key: str, kind: str) -> _Statistics:
        """Return how the normaliser normalises the feature `key` of the type `kind`, and by what.

        Without statistics LeRobot leaves the feature as it is.
        """
        normaliser = _UNNORMALISER if self._name == _AFTER else _NORMALISER
        if normaliser not in self._steps:
            return configured.get(kind, _FORMER_MODES[kind]), {}
        config, where = self.config(normaliser), f"'{normaliser}' in {self._name}"
        for setting in ("features", "norm_map"):
            if setting not in config:
                raise _error(self._source, f"{where} has no {setting}", _AGAIN)
        modes = _checked_modes(self._source, where, config["norm_map"])
        file, keys = self._steps[normaliser].get("state_file"), config.get("normalize_observation_keys")
        stored = _read_statistics(self._folder, file, f"{key}.") if file else {}
        found = {statistic: values for statistic, values in stored.items() if "." not in statistic}
        if kind == "ACTION":
            return modes.get(kind, _IDENTITY), found
        if keys is not None and key not in keys:
            return _IDENTITY, {}
        if key not in config["features"]:
            return modes.get(kind, _IDENTITY), {}
        return modes.get(config["features"][key]["type"], _IDENTITY), found

    def _error(self, found: str) -> CheckpointError:
        return _error(self._source, f"{self._name} has {found}", _DIFFERENT)


def _relative_actions(
    source: str, before: _Pipeline, after: _Pipeline, configured: bool | None, width: int
) -> list[bool]:
    """Return which of the `width` numbers of an action are relative to the state; an empty list for none.

    As LeRobot's `RelativeActionsProcessorStep`: a joint is excluded by a part of its name in any case, and none is
    excluded where actions have no names.
    """
    own, inverse = before.config(_RELATIVE), after.config(_ABSOLUTE)
    enabled = own.get("enabled", False)
    if {enabled, inverse.get("enabled", False)} != {enabled if configured is None else configured}:
        raise _error(
            source,
            f"use_relative_actions of config.json, '{_RELATIVE}' in {_BEFORE} and '{_ABSOLUTE}' in {_AFTER} differ, "
            "expected all or none",
            "Save the policy and its pipelines again.",
        )
    if not enabled:
        return []
    excluded = [joint.lower() for joint in own.get("exclude_joints", []) if joint]
    names = [name.lower() for name in own.get("action_names") or []][:width]
    relative = [not any(joint in name for joint in excluded) for name in names]
    return relative + [True] * (width - len(relative))


def _checked_modes(source: str, where: str, modes: Mapping[str, str]) -> Mapping[str, str]:
    for kind, mode in modes.items():
        if kind not in _KINDS or mode not in _MODES:
            expected = f"expected {', '.join(_KINDS)} by {', '.join(_MODES)}"
            raise _error(source, f"{where} normalises {kind} by '{mode}', {expected}", _DIFFERENT)
    return modes


def _read_statistics(folder: Path, name: str, prefix: str) -> dict[str, Array]:
    """Return the tensors of the safetensors file `name` whose names begin with `prefix`, by the rest of their names.

    Raises `CheckpointError` for a file that cannot be read, and for a tensor of more than 4096 numbers.
    """
    with open_shard(folder, name) as file:
        return _small_tensors(folder / name, {one: (file, one) for one in file.keys()}, prefix)  # noqa: SIM118


def _small_tensors(path: Path, owners: Mapping[str, tuple[Any, str]], prefix: str) -> dict[str, Array]:
    found = {}
    for name, (handle, stored) in owners.items():
        if name.startswith(prefix):
            shape = handle.get_slice(stored).get_shape()
            if prod(shape) > _MOST_STATISTICS:
                raise CheckpointError(
                    f"'{path}': the statistic '{stored}' has the shape {shape}, expected at most {_MOST_STATISTICS} "
                    "numbers. Save the policy again with the statistics of its data set."
                )
            found[name.removeprefix(prefix)] = handle.get_tensor(stored)
    return found


def _former_statistics(
    source: str, folder: Path, modes: Mapping[str, str], cameras: Sequence[str]
) -> dict[str, _Statistics]:
    """Return the statistics of a policy of LeRobot up to 0.3, which are among its weights."""
    if modes["VISUAL"] != _IDENTITY:
        raise _normalised_frames(source, cameras[0], modes["VISUAL"])
    found: dict[str, _Statistics] = {}
    with closing(SafetensorsWeights(folder)) as weights:
        for key, kind in ((STATE, "STATE"), (ACTION, "ACTION")):
            found[key] = modes[kind], _small_tensors(folder, weights.owners, _FORMER_TENSORS[key])
            if modes[kind] != _IDENTITY and not found[key][1]:
                what = f"it has neither pipelines of steps ({_BEFORE}) nor weights '{_FORMER_TENSORS[key]}*'"
                raise _error(source, f"{what}, the statistics for {modes[kind]}", _AGAIN)
    return found


def _normalised_frames(source: str, camera: str, mode: str) -> CheckpointError:
    return _error(source, f"the frames of '{camera}' are normalised by '{mode}', expected {_IDENTITY}", _DIFFERENT)


def _normalisation(
    source: str, own: str, mode: str, statistics: Mapping[str, Array], width: int, most: int
) -> dict[str, Any]:
    """Return the fields of processor_config.json about `own` ("state" or "actions"), which has `width` numbers.

    Statistics broadcast as in LeRobot. A state has as many numbers as its statistics, up to `most`: a policy that was
    fine-tuned from a base checkpoint has the base checkpoint's `width`.
    """
    if mode == _IDENTITY:
        return {f"{own}_mean": [0.0] * width, f"{own}_std": [1.0] * width}
    if not statistics:
        return {f"{own}_width": width}
    given = [np.asarray(statistics.get(name, np.zeros(0)), np.float32) for name in _MODES[mode]]
    lengths = {values.shape[-1] for values in given if values.ndim} - {1}
    length = lengths.pop() if lengths and own == "state" else width
    fits, unfit = not lengths - {length} and 1 <= length <= most, ""
    if not fits or any(values.size not in (1, length) or values.size != prod(values.shape[-1:]) for values in given):
        unfit, length = f"have the shapes {' and '.join(str(list(values.shape)) for values in given)}", width
    elif not all(np.isfinite(values).all() for values in given):
        unfit = "are not all finite"
    if unfit:
        names = " and ".join(f"'{name}'" for name in _MODES[mode])
        raise _error(
            source,
            f"the statistics {names} of the {own} {unfit}, expected {length} finite numbers each for {mode}",
            "Save the policy again with the statistics of its data set.",
        )
    return {
        f"{own}_{wanted}": np.broadcast_to(values.reshape(-1), length).tolist()
        for wanted, values in zip(_MODES[mode].values(), given, strict=True)
    }
