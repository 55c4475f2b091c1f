"""Policies that LeRobot's own code writes, loads and runs, in the sizes of a small checkpoint of transformers' form.

    python -m support.lerobot.saved_policies PI0 PI05 FOLDER

writes FOLDER/pi0/NAME and FOLDER/pi05/NAME for each of `cases`, as `lerobot-train` does, and next to it NAME.npz: an
observation, noise, and the actions of the policy that LeRobot loads from NAME with its pipelines. The small
checkpoints PI0 and PI05 have the sizes, and the tokenizer in place of the hub's.
"""

from __future__ import annotations

import copy
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from lerobot import __version__
from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
from lerobot.policies.factory import make_pre_post_processors
from lerobot.processor import tokenizer_processor

FORMER = __version__.startswith("0.4.")
"""LeRobot 0.4 fills bars with -3, writes pi0.5's state with zeros after it, and needs a fork of transformers."""
STATE, ACTION, IMAGES = "observation.state", "action", "observation.images."
TOP, WRIST = f"{IMAGES}top", f"{IMAGES}wrist"
WIDTHS = {STATE: 5, ACTION: 3}
MODES = [mode.value for mode in NormalizationMode]
SIZES = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"} | {
    *("head_dim", "vocab_size", "image_size", "patch_size", "projection_dim")
}


def cases(kind: str, side: int) -> dict[str, dict[str, Any]]:
    """Return by name what each policy differs in."""
    square = {TOP: (side, side), WRIST: (side, side)}
    found: dict[str, dict[str, Any]] = {mode: {"modes": (mode, mode)} for mode in MODES}
    found |= {
        "mixed": {"modes": ("MIN_MAX", "MEAN_STD")},
        "renamed": {"renamed": {f"{IMAGES}front": TOP}, "frames": {f"{IMAGES}front": (side, side), **square}},
        "swapped": {"renamed": {TOP: WRIST, WRIST: TOP}},
        "one-camera": {"frames": {WRIST: (side, side)}},
        "larger-frames": {"frames": {TOP: (2 * side, 2 * side), WRIST: (side // 2, side // 2)}},
        "rows": {"reshaped": lambda values: values[None]},
        "one-for-all": {"reshaped": lambda values: values[:1]},
        "other-keys": {"keys": {TOP}},
        "no-statistics": {"statistics": False},
        "of-a-data-set": {"prefix": "so100.buffer."},
        "base-state": {"state": 6},
    }
    del found["renamed"]["frames"][TOP]
    if not FORMER:
        found["wide-frames"] = {"frames": {TOP: (75, 100), WRIST: (130, 90)}}
        found["relative"] = {"relative": True}
        found["relative-mean"] = {"modes": ("MEAN_STD", "MEAN_STD"), "relative": True}
    return {name: {"modes": ("QUANTILES",) * 2, "frames": square, **case} for name, case in found.items()}


def statistics(case: dict[str, Any]) -> dict[str, dict[str, np.ndarray]] | None:
    """Return the statistics of a data set whose second joint never moved."""
    if not case.get("statistics", True):
        return None
    random, found = np.random.default_rng(7), {}
    reshape = case.get("reshaped", lambda values: values)
    for key, width in WIDTHS.items():
        middle, half = random.uniform(-1, 1, width), random.uniform(0.5, 2, width)
        half[1] = 0
        own = {"mean": middle, "std": half / 2, "min": middle - half, "max": middle + half}
        own |= {"q01": middle - 0.9 * half, "q99": middle + 0.9 * half}
        own |= {"q10": middle - 0.5 * half, "q90": middle + 0.5 * half}
        found[case.get("prefix", "") + key] = {
            **{name: reshape(values.astype(np.float32)) for name, values in own.items()},
            "count": np.array([3]),
        }
    return found


def write(kind: str, case: dict[str, Any], policy: Any, folder: Path) -> None:
    """Write the policy and its pipelines into the new `folder`."""
    module = importlib.import_module(f"lerobot.policies.{kind}.processor_{kind}")
    make = getattr(module, f"make_{kind}_pre_post_processors")
    config = policy.config = copy.deepcopy(policy.config)
    state, action = case["modes"]
    config.normalization_mapping = {
        key: NormalizationMode(mode) for key, mode in (("VISUAL", "IDENTITY"), ("STATE", state), ("ACTION", action))
    }
    config.input_features[STATE] = PolicyFeature(FeatureType.STATE, (case.get("state", WIDTHS[STATE]),))
    if case.get("relative"):
        config.use_relative_actions, config.relative_exclude_joints = True, ["GRIP"]
        config.action_feature_names = ["shoulder.pos", "Gripper.pos"]
    before, after = make(config, statistics(case))
    # As `lerobot-train` overrides them.
    before.steps[0].rename_map = case.get("renamed", {})
    for step in before.steps:
        if hasattr(step, "normalize_observation_keys"):
            step.normalize_observation_keys = case.get("keys")
    for part in (policy, before, after):
        part.save_pretrained(folder)


def run(policy: type, case: dict[str, Any], folder: Path) -> dict[str, np.ndarray]:
    """Return an observation, and the actions of the saved policy."""
    loaded = policy.from_pretrained(folder)
    before, after = make_pre_post_processors(loaded.config, str(folder))
    random, own = np.random.default_rng(3), statistics({})
    frames = {key: random.integers(0, 256, (*size, 3), np.uint8) for key, size in case["frames"].items()}
    state = own[STATE]["mean"] + random.uniform(-0.4, 0.4, WIDTHS[STATE]).astype(np.float32)
    state[1] = own[STATE]["mean"][1]
    shape = (1, loaded.config.chunk_size, loaded.config.max_action_dim)
    noise = random.standard_normal(shape, np.float32)
    observation: dict[str, Any] = {
        key: torch.from_numpy(frame).permute(2, 0, 1).float() / 255 for key, frame in frames.items()
    }
    batch = before({**observation, STATE: torch.from_numpy(state), "task": "pick up the cup"})
    with torch.no_grad():
        actions = after(loaded.predict_action_chunk(batch, noise=torch.from_numpy(noise)))
    return {**frames, STATE: state, "noise": noise[0], "actions": actions[0].numpy()}


def use_sizes(modeling: ModuleType, small: dict[str, Any]) -> None:
    """Have LeRobot build models of the sizes in the config.json `small`."""
    vlm, expert = small["vlm_config"], small["dit_config"]
    parts = {"gemma_2b": vlm["text_config"], "gemma_300m": expert}

    def variant(name: str) -> Any:
        own = parts[name]
        return SimpleNamespace(
            width=own["hidden_size"],
            depth=own["num_hidden_layers"],
            mlp_dim=own["intermediate_size"],
            num_heads=own["num_attention_heads"],
            num_kv_heads=own["num_key_value_heads"],
            head_dim=own["head_dim"],
        )

    def resized(build: Any) -> Any:
        def built(config: Any) -> Any:
            if hasattr(config, "vision_config"):
                for part in ("text_config", "vision_config"):
                    for name in SIZES & vlm[part].keys():
                        setattr(getattr(config, part), name, vlm[part][name])
                config.projection_dim = vlm["projection_dim"]
                config.image_token_index = config.image_token_id = vlm["image_token_index"]
            else:
                config.vocab_size = vlm["text_config"]["vocab_size"]
            return build(config=config)

        return built

    modeling.get_gemma_config = variant
    for name in ("PaliGemmaForConditionalGeneration", "GemmaForCausalLM"):
        name += "" if FORMER else "WithPiGemma" if name.startswith("Pali") else ""
        name = f"Pi{name}" if not FORMER and name.startswith("Gemma") else name
        setattr(modeling, name, resized(getattr(modeling, name)))


def stand_in_for_the_fork() -> None:
    """Have transformers compute what LeRobot 0.4's fork of it does for pi0.

    The fork scales no embeddings, and its caches do not grow where `use_cache` is false.
    """
    from transformers.models.gemma.modeling_gemma import GemmaModel
    from transformers.models.paligemma.modeling_paligemma import PaliGemmaModel

    check = ModuleType("transformers.models.siglip.check")
    check.check_whether_transformers_replace_is_installed_correctly = lambda: True  # type: ignore[attr-defined]
    sys.modules[check.__name__] = transformers.models.siglip.check = check
    forward, features = GemmaModel.forward, PaliGemmaModel.get_image_features

    def unscaled(self: Any, *, inputs_embeds: Any, past_key_values: Any, adarms_cond: Any, **options: Any) -> Any:
        cache = past_key_values if options["use_cache"] else copy.deepcopy(past_key_values)
        scaled = inputs_embeds / self.config.hidden_size**0.5
        return forward(self, inputs_embeds=scaled, past_key_values=cache, **options)

    GemmaModel.forward = unscaled
    PaliGemmaModel.get_image_features = lambda self, pixels: (
        features(self, pixels) * self.config.text_config.hidden_size**0.5
    )


def main(kind: str, small: Path, folder: Path) -> None:
    modeling = importlib.import_module(f"lerobot.policies.{kind}.modeling_{kind}")
    sizes = json.loads((small / "config.json").read_text())
    use_sizes(modeling, sizes)
    if FORMER:
        stand_in_for_the_fork()
    file = str(small / "tokenizer.json")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=file, pad_token="<pad>")
    tokenizer_processor.AutoTokenizer = SimpleNamespace(from_pretrained=lambda name: tokenizer)
    policy_class = getattr(modeling, f"{kind.upper()}Policy")
    side = sizes["vlm_config"]["vision_config"]["image_size"]
    config = policy_class.config_class(
        input_features={key: PolicyFeature(FeatureType.VISUAL, (3, side, side)) for key in (TOP, WRIST)},
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, (WIDTHS[ACTION],))},
        chunk_size=sizes["chunk_size"],
        n_action_steps=sizes["chunk_size"],
        max_state_dim=sizes["max_state_dim"],
        max_action_dim=sizes["max_action_dim"],
        image_resolution=(side, side),
        empty_cameras=1,
        device="cpu",
    )
    torch.manual_seed(0)
    policy = policy_class(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in policy.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
            elif parameter_name.endswith("bias") or "norm" in parameter_name:
                parameter.normal_(std=0.1)
        policy.model.paligemma_with_expert.paligemma.get_input_embeddings().weight.normal_(std=0.2)
    found = cases(kind, side)
    for case_name, case in found.items():
        write(kind, case, policy, folder / case_name)
        np.savez(folder / f"{case_name}.npz", **run(policy_class, case, folder / case_name))


if __name__ == "__main__":
    *smalls, place = map(Path, sys.argv[1:])
    for policy_kind, source in zip(["pi0"] if FORMER else ["pi0", "pi05"], smalls, strict=False):
        main(policy_kind, source, place / policy_kind)
