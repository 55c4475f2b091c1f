"""Checkpoints of policies in LeRobot's form, read as if transformers had written them.

LeRobot's config.json is a `PreTrainedConfig` with `type`. It names variants of Gemma instead of their sizes.
Statistics are those of the steps in policy_preprocessor.json and policy_postprocessor.json. Up to version 0.3 they
were tensors of the model (lerobot.processor.normalize_processor and lerobot.policies.pi0).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

import numpy as np

from sinkprune.contract.checks.fields import Bounds
from sinkprune.contract.errors import CheckpointError
from sinkprune.contract.image_settings import Number
from sinkprune.contract.precision import Array
from sinkprune.contract.towers import Side
from sinkprune.export.checkpoint.folder import Name, has_entry, read_fields, read_json, read_tensors
from sinkprune.export.presets import PRESETS

POLICIES = {"pi0": "pi0", "pi05": "pi0.5"}
"""The presets of the policies that are read, by LeRobot's `type`."""
TOKENIZER = "google/paligemma-3b-pt-224"
"""The tokenizer that LeRobot loads from the hub."""
VARIANTS: dict[str, dict[str, int]] = {
    "gemma_2b": {"hidden_size": 2048, "intermediate_size": 16384},
    "gemma_300m": {"hidden_size": 1024, "intermediate_size": 4096},
}
"""The sizes in which variants of Gemma differ (openpi, models/gemma.py)."""
STATE, ACTION = "observation.state", "action"

_EPSILON = 1e-8
_MODES = {
    "MEAN_STD": {"mean": "mean", "std": "std"},
    "MIN_MAX": {"min": "low", "max": "high"},
    "QUANTILES": {"q01": "low", "q99": "high"},
    "QUANTILE10": {"q10": "low", "q90": "high"},
}
"""LeRobot's statistics of each way to normalise, and their names in processor_config.json."""
_FILES = {STATE: "policy_preprocessor.json", ACTION: "policy_postprocessor.json"}
_NORMALISERS = {STATE: "normalizer_processor", ACTION: "unnormalizer_processor"}
_FORMER_TENSORS = {
    STATE: "normalize_inputs.buffer_observation_state.",
    ACTION: "unnormalize_outputs.buffer_action.",
}
_STEPS = (
    "rename_observations_processor",
    "to_batch_processor",
    "pi0_new_line_processor",
    "pi05_prepare_state_tokenizer_processor_step",
    "tokenizer_processor",
    "device_processor",
    *_NORMALISERS.values(),
)
_SWITCHED_STEPS = ("relative_actions_processor", "absolute_actions_processor")
"""Steps that do something only if they are `enabled`."""

_Dimension = Annotated[int, Bounds(1, 1 << 12)]
_Period = Annotated[Number, Bounds(1e-6, 1e6)]


class _Feature(TypedDict):
    type: Name
    shape: Annotated[list[Annotated[int, Bounds(1, 1 << 20)]], Bounds(0, 8)]


class _Switches(TypedDict, total=False):
    """Settings that change what a policy computes. All are false by default, and must be."""

    use_relative_actions: bool | None
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


class _StepConfig(TypedDict, total=False):
    eps: Number
    norm_map: dict[str, Name]
    enabled: bool
    tokenizer_name: Name


class _Step(TypedDict, total=False):
    registry_name: Name
    config: _StepConfig
    state_file: Name


class _Pipeline(TypedDict):
    steps: Annotated[list[_Step], Bounds(0, 100)]


def is_lerobot(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json has LeRobot's form."""
    return "type" in config and "model_type" not in config


def translated_config(source: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of transformers' form for LeRobot's; raises `CheckpointError`."""
    known = _read(source, config)
    made = copy.deepcopy(PRESETS[POLICIES[known["type"]]])
    prefix, expert = known.get("paligemma_variant", "gemma_2b"), known.get("action_expert_variant", "gemma_300m")
    for name, variant in (("paligemma_variant", prefix), ("action_expert_variant", expert)):
        if variant not in VARIANTS:
            raise _error(source, f"{name} is '{variant}', expected {' or '.join(VARIANTS)}", _DIFFERENT)
    vlm, width = made["vlm_config"], VARIANTS[prefix]["hidden_size"]
    vlm["text_config"] |= VARIANTS[prefix]
    vlm["projection_dim"] = vlm["vision_config"]["projection_dim"] = width
    vlm["vision_config"]["image_size"] = _side(source, known)
    made["dit_config"] |= VARIANTS[expert]
    if "num_steps" in known:
        made["num_inference_steps"] = known["num_steps"]
    return {**made, **{name: known[name] for name in PolicyFields.__annotations__ if name in known}}


def translated_files(source: str, folder: Path, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the JSON files of transformers' form for a folder with LeRobot's `config`; raises `CheckpointError`."""
    known = _read(source, config)
    side = _side(source, known)
    former = "resize_imgs_with_padding" in known
    pixels = {
        "image_processor_type": "resize_with_pad" if former else "resize_with_pad_torch",
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "resample": 2,
        "pad_size": {"height": side, "width": side},
    }
    widths = {STATE: known.get("max_state_dim", 32), ACTION: known.get("max_action_dim", 32)}
    for features in (known.get("input_features") or {}, known.get("output_features") or {}):
        for key in widths.keys() & features.keys():
            widths[key] = _width(source, key, features[key]["shape"], widths[key])
    policy: dict[str, Any] = {"cameras": _cameras(source, known)}
    if "tokenizer_max_length" in known:
        policy["most_prompt_tokens"] = known["tokenizer_max_length"]
    for key, own, kind in ((STATE, "state", "STATE"), (ACTION, "actions", "ACTION")):
        mode, statistics = _statistics(source, folder, known, key, kind)
        policy |= _normalisation(source, own, mode, statistics, widths[key])
    return {
        "config.json": translated_config(source, config),
        "preprocessor_config.json": pixels,
        "processor_config.json": policy,
    }


def check_tokenizer(source: str, folder: Path) -> None:
    """Raise `CheckpointError` if a folder in LeRobot's form has no tokenizer of its own."""
    if not has_entry(folder, "tokenizer.json"):
        raise _error(
            source,
            "it has no tokenizer.json, because LeRobot loads its tokenizer from the hub",
            f"Accept its licence on the hub, and add --tokenizer {TOKENIZER}; or give a local folder with this "
            "tokenizer.",
        )


_DIFFERENT = "Such policies are not supported yet."
_AGAIN = "Download the checkpoint again."


def _error(source: str, found: str, remedy: str) -> CheckpointError:
    return CheckpointError(f"checkpoint '{source}': {found}. {remedy}")


def _read(source: str, config: Mapping[str, Any]) -> Any:
    """Return the known fields of LeRobot's config.json; raises `CheckpointError` for unsupported settings."""
    known = read_fields(_Fields, config, f"checkpoint '{source}': config.json")
    kind = known.get("type")
    if kind not in POLICIES:
        raise _error(source, f"it is a policy of LeRobot's type '{kind}'", f"Supported types: {', '.join(POLICIES)}.")
    for name in _Switches.__annotations__:
        if known.get(name):
            raise _error(source, f"{name} is true, expected false", _DIFFERENT)
    return known


def _side(source: str, known: Mapping[str, Any]) -> int:
    """Return the pixels along a side of the tower's square."""
    sides: Sequence[int] = known.get("image_resolution") or known.get("resize_imgs_with_padding") or (224, 224)
    if sides[0] != sides[1]:
        raise _error(source, f"image_resolution is {list(sides)}, expected a square", _DIFFERENT)
    return sides[0]


def _cameras(source: str, known: Mapping[str, Any]) -> list[str]:
    """Return the cameras in the order in which the model takes them. Those without a frame come last and are masked,
    so that their order changes nothing.
    """
    features = known.get("input_features") or {}
    names = [key for key, feature in features.items() if feature["type"] == "VISUAL"]
    empty = (f"observation.images.empty_camera_{number}" for number in range(known.get("empty_cameras", 0)))
    names += [name for name in empty if name not in names]
    if not names:
        raise _error(source, "input_features has no camera, expected features of the type VISUAL", _AGAIN)
    return names


def _width(source: str, key: str, shape: Sequence[int], most: int) -> int:
    if len(shape) != 1 or shape[0] > most:
        raise _error(source, f"feature '{key}' has the shape {list(shape)}, expected one of up to {most}", _AGAIN)
    return shape[0]


def _statistics(
    source: str, folder: Path, known: Mapping[str, Any], key: str, kind: str
) -> tuple[str, Mapping[str, Array]]:
    """Return how the feature `key` of the type `kind` is normalised, and its statistics by name."""
    name, modes = _FILES[key], known.get("normalization_mapping") or {}
    if not has_entry(folder, name):
        prefix = _FORMER_TENSORS[key]
        return modes.get(kind, "IDENTITY"), _named(read_tensors(folder, "model.safetensors", prefix), prefix)
    where = f"checkpoint '{source}': {name}"
    steps = read_fields(_Pipeline, read_json(folder, name), where)["steps"]
    own = None
    for step in steps:
        registered, config = step.get("registry_name", "without a name"), step.get("config", {})
        if registered not in _STEPS and not (registered in _SWITCHED_STEPS and config.get("enabled") is False):
            raise _error(source, f"{name} has the step '{registered}', which is not known", _DIFFERENT)
        own = step if registered == _NORMALISERS[key] else own
    if own is None:
        return "IDENTITY", {}
    config = own.get("config", {})
    if config.get("eps", _EPSILON) != _EPSILON:
        raise _error(source, f"eps in {name} is {config['eps']}, expected {_EPSILON}", _DIFFERENT)
    modes = config.get("norm_map", modes)
    tensors = read_tensors(folder, own["state_file"], f"{key}.") if "state_file" in own else {}
    return modes.get(kind, "IDENTITY"), _named(tensors, f"{key}.")


def _named(tensors: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): values for name, values in tensors.items()}


def _normalisation(
    source: str, own: str, mode: str, statistics: Mapping[str, Array], width: int
) -> dict[str, list[float]]:
    """Return the statistics `own` ("state" or "actions") of a processor_config.json, for `width` numbers."""
    if mode != "IDENTITY" and mode not in _MODES:
        raise _error(
            source, f"the {own} is normalised by '{mode}', expected IDENTITY, {', '.join(_MODES)}", _DIFFERENT
        )
    if mode == "IDENTITY" or not statistics:
        # LeRobot leaves what has no statistics as it is.
        return {f"{own}_mean": [0.0] * width, f"{own}_std": [1.0] * width}
    found = {}
    for name, wanted in _MODES[mode].items():
        values = np.asarray(statistics.get(name, []), np.float32)
        if values.shape != (width,) or not np.isfinite(values).all():
            raise _error(
                source,
                f"statistic '{name}' of the {own} has the shape {list(values.shape)} or numbers that are not finite, "
                f"expected {width} finite numbers for {mode}",
                "Save the policy again with the statistics of its data set.",
            )
        found[f"{own}_{wanted}"] = [float(value) for value in values]
    return found
