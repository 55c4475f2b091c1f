"""The option `sinkprune` of a model's configuration, as in `{"sinkprune": {"sanitizer_of": "retain-64"}}`.

It names the budget whose sanitizer runs. Budgets and counts are those of sinkprune (docs/budgets.md there).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.logger import init_logger

from sinkprune_vllm.sanitizer import Counts

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NAME, KEY = "sinkprune", "sanitizer_of"
OUTLIERS_PER_MILLE = 10
NO_VIDEO_PRUNED = 2.0**-64
"""A rate that vLLM takes for pruning, by which its own pruning of videos would keep every token."""


class Family(NamedTuple):
    """A family of models that is pruned."""

    model: str
    """Its class here, as vLLM's registry takes it."""
    towers: Collection[str]
    """The values of its vision tower's `model_type`."""
    tokens: int
    """The number of tokens of a group that the counts of `budgets` are of."""
    budgets: Mapping[str, tuple[int, int]]
    """How many salient and diverse tokens a budget keeps."""
    corrects_positions: bool = False
    """Whether positions of a prompt depend on the kept tokens."""


LLAVA = {"retain-192": (192, 192), "retain-128": (128, 128), "retain-64": (64, 64), "retain-32": (32, 32)}
LLAVA_NEXT = {"retain-320": (64, 64), "retain-160": (32, 32)}
QWEN = {"prune-66.7": (450, 50), "prune-77.8": (450, 50), "prune-80": (400, 50), "prune-88.9": (200, 50)}
CLIP, HERE = ["clip_vision_model"], __package__
QWEN_TOWERS = ["qwen2_5_vl", "qwen2_5_vl_vision", "qwen3_vl", "qwen3_vl_vision"]
FAMILIES = {
    "LlavaForConditionalGeneration": Family(f"{HERE}.llava:PrunedLlava", CLIP, 576, LLAVA),
    "LlavaNextForConditionalGeneration": Family(f"{HERE}.llava:PrunedLlavaNext", CLIP, 576, LLAVA_NEXT),
    "Qwen2_5_VLForConditionalGeneration": Family(f"{HERE}.qwen:PrunedQwen25", QWEN_TOWERS, 1000, QWEN, True),
    "Qwen3VLForConditionalGeneration": Family(f"{HERE}.qwen:PrunedQwen3", QWEN_TOWERS, 1000, QWEN, True),
}
"""By vLLM's name of the architecture."""


def budget_of(hf_config: Any) -> str | None:
    """Return the name of the budget in a model's configuration, None for a model without the option.

    Raises `ValueError` for an option of another form.
    """
    if not hasattr(hf_config, NAME):
        return None
    option = getattr(hf_config, NAME)
    if not isinstance(option, Mapping) or option.keys() != {KEY} or not isinstance(option[KEY], str):
        raise ValueError(f'option \'{NAME}\' is {option!r}, expected the name of a budget: {{"{KEY}": "retain-64"}}.')
    return option[KEY]


def counts_of(family: Family, budget: str, tokens: int) -> Counts:
    """Return the counts of a group of `tokens` tokens."""
    outliers = -(-tokens * OUTLIERS_PER_MILLE // 1000)
    reserve, diverse = (max(1, tokens * count // family.tokens) for count in family.budgets[budget])
    reserve = min(reserve, tokens - outliers)
    return Counts(outliers, reserve, min(diverse, tokens - outliers - reserve))


def counts_in(model_config: Any, tokens: int) -> Counts | None:
    """Return the counts of a group of `tokens` tokens in this model; None for a model without the option."""
    budget = budget_of(model_config.hf_config)
    return None if budget is None else counts_of(FAMILIES[model_config.architecture], budget, tokens)


def check(config: VllmConfig) -> None:
    """Raise `ValueError` if the model has the option and would be pruned otherwise than asked, or not at all.

    Makes vLLM ask the model for positions if they depend on the kept tokens.
    """
    model = config.model_config
    budget = budget_of(model.hf_config) if model is not None else None
    if budget is None:
        _check_spelling(model)
        return
    family = FAMILIES.get(model.architecture)
    if family is None:
        raise ValueError(
            f"vLLM runs this model as {model.architecture}, and option '{NAME}' prunes {', '.join(FAMILIES)}. "
            "Leave the option out."
        )
    if budget not in family.budgets:
        raise ValueError(
            f"unknown budget '{budget}'. {model.architecture} has {', '.join(family.budgets)}. To prune nothing, "
            f"leave option '{NAME}' out."
        )
    hf, mm, lora = model.hf_config, model.multimodal_config, config.lora_config
    tower, strategy = hf.vision_config.model_type, getattr(hf, "vision_feature_select_strategy", "default")
    for name, given, why in [
        (f"vision_config.model_type {tower}", tower not in family.towers, f"it needs {' or '.join(family.towers)}"),
        (f"vision_feature_select_strategy {strategy}", strategy != "default", "it needs default"),
        ("a list in vision_feature_layer", isinstance(getattr(hf, "vision_feature_layer", 0), list),
         "the attention of one layer chooses the tokens"),
        ("--compilation-config '{\"compile_mm_encoder\": true}'", config.compilation_config.compile_mm_encoder,
         "the attention of a compiled vision tower cannot be read"),
        ("--mm-encoder-tp-mode data", mm.mm_encoder_tp_mode == "data",
         "no device would have the attention of all pictures"),
        ("--pipeline-parallel-size",
         family.corrects_positions and config.parallel_config.pipeline_parallel_size > 1,
         "vLLM corrects positions in the first stage only"),
        ("--enable-mm-embeds", mm.enable_mm_embeds, "embeddings of pictures come without the tower's attention"),
        ("--enable-tower-connector-lora", lora is not None and lora.enable_tower_connector_lora,
         "vLLM computes the tower's tokens from the LLM's"),
    ]:  # fmt: skip
        if given:
            raise ValueError(f"option '{NAME}' does not work with {name}: {why}. Leave one of the two out.")
    if family.corrects_positions:
        mm.video_pruning_rate = NO_VIDEO_PRUNED
    init_logger(f"vllm.{NAME}").info("pictures are pruned by the sanitizer of %s", budget)


def _check_spelling(model: Any) -> None:
    """Raise `ValueError` if the overrides of a model without the option have a key that is nearly its name."""
    given = model.hf_overrides if model is not None and isinstance(model.hf_overrides, Mapping) else ()
    for wrong in get_close_matches(NAME, given, 1):
        raise ValueError(f"--hf-overrides has '{wrong}', which nothing reads: expected '{NAME}', or no such key.")
