"""Checkpoints of policies in LeRobot's form, with the weights of small ones in transformers' form."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sinkprune.export.checkpoint import lerobot
from sinkprune.export.checkpoint.presets import PRESETS

CAMERAS = ("observation.images.top", "observation.images.wrist")
EMPTY = "observation.images.empty_camera_0"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
Array = np.ndarray[Any, Any]

_NAMES = [
    # safetensors keeps one name of tensors that share memory: LeRobot's head, and not the embedding table.
    (r"model\.language_model\.model\.embed_tokens\.", "lm_head."),
    (r"model\.language_model\.model\.", "model.language_model."),
    (r"model\.vision_tower\.", "model.vision_tower.vision_model."),
    (r"^", "model."),
]


def lerobot_name(name: str) -> str:
    """Return LeRobot 0.4's name of a tensor that transformers saves under `name`."""
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def use_small_sizes(monkeypatch: pytest.MonkeyPatch, folder: Path, kind: str = "pi0") -> None:
    """Have LeRobot's variants name the sizes of the small checkpoint in `folder`: the true ones are of gigabytes."""
    config = json.loads((folder / "config.json").read_text())
    sizes = {
        variant: {key: part[key] for key in ("hidden_size", "intermediate_size")}
        for variant, part in (("gemma_2b", config["vlm_config"]["text_config"]), ("gemma_300m", config["dit_config"]))
    }
    monkeypatch.setattr(lerobot, "VARIANTS", sizes)
    monkeypatch.setitem(PRESETS, lerobot.POLICIES[kind], {**config, "model_type": kind})


def write_lerobot_checkpoint(
    source: Path,
    folder: Path,
    statistics: Mapping[str, Mapping[str, Array]],
    *,
    modes: tuple[str, str] = ("MEAN_STD", "MEAN_STD"),
    kind: str = "pi0",
    tokenizer: bool = True,
    **changes: Any,
) -> Path:
    """Write the small checkpoint `source` as LeRobot 0.4 saves a policy of the type `kind`, into the new `folder`.

    `statistics` are those of "observation.state" and "action" by name, and `modes` their normalisation. `changes` are
    other fields of config.json.
    """
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    tensors = {lerobot_name(name): values for name, values in load_file(source / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    widths = {key: len(next(iter(own.values()))) for key, own in statistics.items()}
    features, action = policy_features(
        widths.get("observation.state", config["max_state_dim"]), widths.get("action", config["max_action_dim"])
    )
    mapping = {"VISUAL": "IDENTITY", "STATE": modes[0], "ACTION": modes[1]}
    side = config["vlm_config"]["vision_config"]["image_size"]
    written = {
        **policy_fields(kind, side, config["chunk_size"], config["max_state_dim"], config["max_action_dim"]),
        "input_features": features,
        "output_features": action,
        "device": "cpu",
        "use_amp": False,
        "push_to_hub": False,
        "dtype": "float32",
        "num_inference_steps": 10,
        "min_period": 0.004,
        "max_period": 4.0,
        "empty_cameras": 1,
        "tokenizer_max_length": 200 if kind == "pi05" else 48,
        "normalization_mapping": mapping,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps({name: value for name, value in written.items() if value != "-"}))
    write_pipelines(folder, kind, {**features, **action}, mapping, statistics)
    for name in TOKENIZER_FILES if tokenizer else ():
        if (source / name).exists():
            shutil.copy(source / name, folder)
    return folder


def policy_features(state: int, actions: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inputs and the outputs of a policy of two cameras, with the width of a state and of an action."""
    top, wrist = ({name: {"type": "VISUAL", "shape": [3, 480, 640]}} for name in CAMERAS)
    own = {"observation.state": {"type": "STATE", "shape": [state]}}
    return {**top, **own, **wrist}, {"action": {"type": "ACTION", "shape": [actions]}}


def policy_fields(kind: str, side: int, chunk: int, state: int, actions: int) -> dict[str, Any]:
    """The fields of config.json that all policies of pi0's kind have; the last two are the most numbers of each."""
    return {
        "type": kind,
        "n_obs_steps": 1,
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "chunk_size": chunk,
        "n_action_steps": chunk,
        "max_state_dim": state,
        "max_action_dim": actions,
        "rtc_config": None,
        "image_resolution": [side, side],
    }


def write_pipelines(
    folder: Path,
    kind: str,
    features: Mapping[str, Any],
    mapping: Mapping[str, str],
    statistics: Mapping[str, Mapping[str, Array]],
) -> None:
    """Write policy_preprocessor.json and policy_postprocessor.json with their tensors."""
    prompt, in_prompt = lerobot._PROMPTS[kind], kind != "pi0"
    normaliser = {"eps": 1e-8, "features": features, "norm_map": mapping}
    device = _step("device", device="cpu", float_dtype=None)
    before = [
        _step("rename_observations", rename_map={}),
        _step("to_batch"),
        {"registry_name": prompt, "config": {}},
        _step("tokenizer", tokenizer_name=lerobot.TOKENIZER, max_length=200 if in_prompt else 48),
        device,
        _step("relative_actions", enabled=False, exclude_joints=["gripper"]),
    ]
    if kind == "pi0_fast":
        tokens = _step("action_tokenizer", trust_remote_code=True, max_action_tokens=256, fast_skip_tokens=4)
        before.insert(4, {**tokens, "artifacts": {"action_tokenizer_name": "action_tokenizer"}})
    # The others write the normalised state into the prompt.
    before.insert(2 if in_prompt else len(before), _step("normalizer", **normaliser))
    after = [_step("unnormalizer", **normaliser), _step("absolute_actions", enabled=False), device]
    flat = {f"{key}.{name}": values for key, own in statistics.items() for name, values in own.items()}
    for name, steps in (("policy_preprocessor", before), ("policy_postprocessor", after)):
        place = next(i for i, step in enumerate(steps) if step["config"] == normaliser)
        if flat:
            file = f"{name}_step_{place}_{steps[place]['registry_name']}.safetensors"
            save_file(flat, folder / file)
            steps[place]["state_file"] = file
        (folder / f"{name}.json").write_text(json.dumps({"name": name, "steps": steps}))


def _step(name: str, **config: Any) -> dict[str, Any]:
    return {"registry_name": f"{name}_processor", "config": config}
