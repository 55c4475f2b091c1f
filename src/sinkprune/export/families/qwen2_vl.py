"""Qwen2-VL: Qwen2.5-VL's model before its tower had windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sinkprune.export.checkpoint.config_fields import Kind, Number
from sinkprune.export.families.llama_shaped import SIZE
from sinkprune.export.families.qwen2_5_vl import VISION_FIELDS, Qwen25VL
from sinkprune.export.models.qwen2_vision import Qwen2Vision


class Qwen2VL(Qwen25VL):
    """A `Qwen2VLForConditionalGeneration` configuration."""

    name = "qwen2-vl"
    tower = Qwen2Vision
    activation = "quick_gelu"
    width_behind_merger = "hidden_size"
    vision_fields: Mapping[str, Kind] = {**VISION_FIELDS, "embed_dim": SIZE, "mlp_ratio": Number(1, 64)}

    def _own_facts(self, vision: Any) -> dict[str, Any]:
        return {
            "hidden_size": vision.embed_dim,
            "intermediate_size": int(vision.embed_dim * vision.mlp_ratio),
            "full_attention_blocks": tuple(range(vision.depth)),
            "window_side": 0,
            "tokens_per_second": None,
        }


FAMILY = Qwen2VL
