"""Qwen3-VL: a tower that outputs tokens and three sets of DeepStack features, and a Qwen3 decoder."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import isqrt
from typing import Annotated, Any

from sinkprune.contract.checks import Bounds
from sinkprune.export.families.llama_shaped import Hidden, Inner, RopeFields, Setting, TextFields, read_language_model
from sinkprune.export.families.qwen2_5_vl import IMAGE_DEFAULTS, MESSAGE_TEMPLATE, Qwen25VL, TokenFields, TowerFields
from sinkprune.export.models.llama import Llama
from sinkprune.export.models.qwen_vision import Qwen3Vision

_DEEPSTACK = 3
"""The number of sets, and of layers of the decoder's first segment: SinkPruner cuts after (2, 6, 15)."""
_AXES = 3


class _RopeFields(RopeFields, total=False):
    mrope_interleaved: bool


class _TextFields(TextFields, total=False):
    rope_scaling: _RopeFields | None  # type: ignore[misc]
    rope_parameters: _RopeFields | None  # type: ignore[misc]


class _VisionFields(TowerFields, total=False):
    intermediate_size: Inner
    out_hidden_size: Hidden
    num_position_embeddings: Annotated[int, Bounds(1, 1 << 20)]
    deepstack_visual_indexes: Annotated[list[Annotated[int, Bounds(0, 1024)]], Bounds(0, 1024)]


class _ConfigFields(TokenFields, total=False):
    vision_config: _VisionFields | None
    text_config: _TextFields | None


class Qwen3VL(Qwen25VL):
    """A `Qwen3VLForConditionalGeneration` configuration, without a mixture of experts."""

    name = "qwen3-vl"
    tower = Qwen3Vision
    activation = "gelu_pytorch_tanh"
    deepstack = _DEEPSTACK
    config_fields = _ConfigFields
    image_defaults: Mapping[str, Any] = {**IMAGE_DEFAULTS, "patch_size": 16}
    image_processors = ("Qwen2VLImageProcessor",)
    chat_template = f"{{% for message in messages %}}{MESSAGE_TEMPLATE}"

    def _settings(self) -> list[Setting]:
        vision, rope = self._config.vision_config, self._config.text_config.rope_parameters or {}
        return [
            *super()._settings(),
            ("vision_config.rope_parameters.rope_type", vision.rope_parameters.get("rope_type"), ("axial",)),
            ("text_config.rope_parameters.mrope_interleaved", rope.get("mrope_interleaved", True), (True,)),
        ]

    def _read_llama(self, text: Any) -> Llama:
        facts, bias = read_language_model(text, self._rope_sections(text)), text.attention_bias
        return Llama(
            facts,
            text.rms_norm_eps,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=False,
            head_norms=True,
            deepstack=self.deepstack,
        )

    def _rope_sections(self, text: Any) -> list[int]:
        """Return the lengths of runs of frequencies that turn with one axis: 1 in turn, and the rest with time."""
        time, height, width = given = text.rope_parameters.get("mrope_section", [24, 20, 20])
        fits = height == width <= time
        self._check(
            [("mrope_section has the same number for height and width, and no smaller for time", fits, given)]
        )
        return [*[1] * (_AXES * height), *([time - height] if time > height else [])]

    def _own_facts(self, vision: Any) -> dict[str, Any]:
        blocks, table = tuple(vision.deepstack_visual_indexes), vision.num_position_embeddings
        ascending = all(before < after for before, after in pairwise((*blocks, vision.depth)))
        if len(blocks) != _DEEPSTACK or not ascending:
            raise self._error(
                f"vision_config.deepstack_visual_indexes is {list(blocks)}, expected "
                f"{_DEEPSTACK} of the tower's {vision.depth} blocks, ascending. Their features are added after the "
                f"decoder's first {_DEEPSTACK} layers, and only its first segment, which ends there, takes any."
            )
        self._check([("num_position_embeddings is a square", isqrt(table) ** 2 == table, table)])
        return {
            "hidden_size": vision.hidden_size,
            "intermediate_size": vision.intermediate_size,
            "full_attention_blocks": tuple(range(vision.depth)),
            "window_side": 0,
            "tokens_per_second": None,
            "position_side": isqrt(table),
            "deepstack_blocks": blocks,
        }

    def _clip_limits(self, given: Mapping[str, Any], frames: int, most: int) -> tuple[dict[str, int], dict[str, int]]:
        """Return Qwen3VLVideoProcessor's limits, and those of one frame.

        Its limits hold for all frames together, and so does `min_pixels` here. `max_pixels` is the limit of a frame
        in the longest clip, so that graphs need not take shorter clips in larger frames.
        """
        size, together = given.get("size") or {}, self.vision.temporal_patch_size
        most = min((size.get("longest_edge") or 768 * 32 * 32) // max(together, frames), most)
        least = min(size.get("shortest_edge") or 128 * 32 * 32, together * most)
        return {"min_pixels": least, "max_pixels": most}, {"min_pixels": -(-least // together), "max_pixels": most}
