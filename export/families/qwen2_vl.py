"""Qwen2-VL: Qwen2.5-VL's model before its tower had windows."""

from __future__ import annotations

from typing import Any

from sinkprune.export.families.configuration import Expectation
from sinkprune.export.families.qwen2_5_vl import Qwen25VL
from sinkprune.export.qwen2_vision import QWEN2, Qwen2Vision


class Qwen2VL(Qwen25VL):
    """A `Qwen2VLForConditionalGeneration` configuration."""

    name = "qwen2-vl"
    parts = QWEN2

    def _config_class(self) -> Any:
        from transformers import Qwen2VLConfig

        return Qwen2VLConfig

    def _vision_settings(self, vision: Any, text: Any) -> list[Expectation]:
        return [
            ("vision_config.model_type", vision.model_type, ("qwen2_vl_vision",)),
            ("vision_config.hidden_act", vision.hidden_act, ("quick_gelu",)),
            ("vision_config.hidden_size", vision.hidden_size, (text.hidden_size,)),
        ]

    def _window_expectations(self, vision: Any) -> list[tuple[str, bool, Any]]:
        return []

    def _vision_width(self, vision: Any) -> int:
        width: int = vision.embed_dim
        return width

    def _read_vision(self, vision: Any, behind: int) -> Qwen2Vision:
        return Qwen2Vision(
            hidden_size=vision.embed_dim,
            intermediate_size=int(vision.embed_dim * vision.mlp_ratio),
            num_heads=vision.num_heads,
            num_blocks=vision.depth,
            full_attention_blocks=tuple(range(vision.depth)),
            window_side=0,
            patch_size=vision.patch_size,
            temporal_patch_size=vision.temporal_patch_size,
            merge_size=vision.spatial_merge_size,
            rope_theta=float(vision.rope_parameters["rope_theta"]),
            out_size=vision.hidden_size,
            salience_block=vision.depth - behind,
            tokens_per_second=None,
        )


FAMILY = Qwen2VL
