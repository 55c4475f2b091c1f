"""Qwen2-VL: Qwen2.5-VL with a tower without windows."""

from __future__ import annotations

from typing import Annotated, Any

from sinkprune.contract.checks.fields import Bounds
from sinkprune.contract.image_settings import Number
from sinkprune.export.families.llama_shaped import Hidden
from sinkprune.export.families.qwen2_5_vl import FlatFields, Qwen25VL, TowerFields
from sinkprune.export.models.qwen2_5_vision import Qwen2Vision


class _VisionFields(TowerFields, total=False):
    embed_dim: Hidden
    mlp_ratio: Annotated[Number, Bounds(1, 64)]


class _ConfigFields(FlatFields, total=False):
    vision_config: _VisionFields | None


class Qwen2VL(Qwen25VL):
    """A `Qwen2VLForConditionalGeneration` configuration."""

    name = "qwen2-vl"
    tower = Qwen2Vision
    activation = "quick_gelu"
    width_setting = "hidden_size"
    config_fields = _ConfigFields

    def _own_facts(self, vision: Any) -> dict[str, Any]:
        return {
            "hidden_size": vision.embed_dim,
            "intermediate_size": int(vision.embed_dim * vision.mlp_ratio),
            "full_attention_blocks": tuple(range(vision.depth)),
            "window_side": 0,
            "tokens_per_second": None,
        }
