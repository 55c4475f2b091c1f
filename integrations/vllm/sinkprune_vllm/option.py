"""The option `sinkprune` of a model's configuration, as in `{"sinkprune": {"sanitizer_of": "retain-64"}}`.

It names the budget whose sanitizer runs. Budgets and counts are those of sinkprune (docs/budgets.md there).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from sinkprune_vllm.sanitizer import Counts

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NAME, KEY = "sinkprune", "sanitizer_of"
OUTLIERS_PER_MILLE = 10
ROW_TOKENS = 576


class Family(NamedTuple):
    """A family of models that is pruned."""

    model: str
    """Its class here, as vLLM's registry takes it."""
    budgets: Mapping[str, tuple[int, int]]
    """The salient and diverse tokens that a budget keeps of `ROW_TOKENS` tokens of a group."""


FAMILIES = {
    "LlavaForConditionalGeneration": Family(
        "sinkprune_vllm.llava:PrunedLlava",
        {"retain-192": (192, 192), "retain-128": (128, 128), "retain-64": (64, 64), "retain-32": (32, 32)},
    ),
    "LlavaNextForConditionalGeneration": Family(
        "sinkprune_vllm.llava:PrunedLlavaNext", {"retain-320": (64, 64), "retain-160": (32, 32)}
    ),
}
"""By vLLM's name of the architecture."""


def budget_of(hf_config: Any) -> str | None:
    """Return the name of the budget in a model's configuration, None for a model without the option.

    Raises `ValueError` for an option of another form.
    """
    option = getattr(hf_config, NAME, None)
    if option is None:
        return None
    if not isinstance(option, Mapping) or option.keys() != {KEY} or not isinstance(option[KEY], str):
        raise ValueError(f'option \'{NAME}\' is {option!r}, expected the name of a budget: {{"{KEY}": "retain-64"}}.')
    return option[KEY]


def cache_key(budget: str) -> str:
    """Return what tells pictures of this budget and method from others in vLLM's caches."""
    return f"sinkpruner-no-text-pruner-{budget}"


def counts_of(family: Family, budget: str, tokens: int) -> Counts:
    """Return the counts of a group of `tokens` tokens."""
    outliers = -(-tokens * OUTLIERS_PER_MILLE // 1000)
    shares = (max(1, tokens * count // ROW_TOKENS) for count in family.budgets[budget])
    reserve, diverse = shares
    reserve = min(reserve, tokens - outliers)
    return Counts(outliers, reserve, min(diverse, tokens - outliers - reserve))


def check(config: VllmConfig) -> None:
    """Raise `ValueError` if the model has the option and would be pruned otherwise than asked, or not at all."""
    model = config.model_config
    budget = budget_of(model.hf_config) if model is not None else None
    if budget is None:
        return
    family = FAMILIES.get(model.architecture)
    if family is None:
        raise ValueError(
            f"vLLM runs this model as {model.architecture}, and option '{NAME}' prunes {' and '.join(FAMILIES)}. "
            "Leave the option out. Of a Qwen-VL, fewer tokens need smaller pictures: "
            """--mm-processor-kwargs '{"max_pixels": 262144}'."""
        )
    if budget not in family.budgets:
        raise ValueError(f"unknown budget '{budget}'. {model.architecture} has {', '.join(family.budgets)}.")
    hf, mm, lora = model.hf_config, model.multimodal_config, config.lora_config
    expected = [
        ("vision_config.model_type", hf.vision_config.model_type, "clip_vision_model"),
        ("vision_feature_select_strategy", hf.vision_feature_select_strategy, "default"),
        ("type of vision_feature_layer", type(hf.vision_feature_layer).__name__, "int"),
    ]
    for name, found, wanted in expected:
        if found != wanted:
            raise ValueError(
                f"{name} is {found}, and option '{NAME}' needs {wanted}, as LLaVA-1.5 has. Leave the option out."
            )
    for name, given, why in [
        ("--compilation-config '{\"compile_mm_encoder\": true}'", config.compilation_config.compile_mm_encoder,
         "the attention of a compiled vision tower cannot be read"),
        ("--enable-mm-embeds", mm.enable_mm_embeds, "embeddings of pictures come without the tower's attention"),
        ("--enable-tower-connector-lora", lora is not None and lora.enable_tower_connector_lora,
         "vLLM computes the tower's tokens from the LLM's"),
    ]:  # fmt: skip
        if given:
            raise ValueError(f"option '{NAME}' does not work with {name}: {why}. Leave one of the two out.")
