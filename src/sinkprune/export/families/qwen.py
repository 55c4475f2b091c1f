"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: checkpoints to graphs.

The tower of Qwen3-VL outputs tokens and three sets of DeepStack features, and its decoder is Qwen3's.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import isqrt
from typing import Annotated, Any, TypedDict

from sinkprune.contract.budgets import FAMILIES
from sinkprune.contract.checks import Bounds
from sinkprune.contract.errors import UsageError
from sinkprune.contract.flops import qwen_tower_flops
from sinkprune.contract.manifest import FrameRate, Frames, LeastPixels, Number, Pixels
from sinkprune.export.checkpoint.folder import Name
from sinkprune.export.checkpoint.text import SpecialTokens
from sinkprune.export.families import WriteGraph
from sinkprune.export.families.llama_shaped import (
    CLIP_PIXELS,
    ConfigFields,
    DecoderFields,
    Heads,
    Hidden,
    Inner,
    LlamaShaped,
    PixelFields,
    RopeFields,
    Setting,
    TextFields,
    Theta,
    Token,
    head_dim,
    read_language_model,
    without_null,
)
from sinkprune.export.models.llama import Llama
from sinkprune.export.models.qwen_vision import Qwen2Vision, Qwen3Vision, QwenVision, build_vision
from sinkprune.export.pruning.plan import VariableTokens

_DEEPSTACK = 3
"""The number of sets, and of layers of the decoder's first segment: SinkPruner cuts after (2, 6, 15)."""
_AXES = 3
_PATCHES = ("patch_size", "temporal_patch_size", "merge_size")
_IMAGE_DEFAULTS: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "resample": 3,
    "min_pixels": 56 * 56,
    "max_pixels": 28 * 28 * 1280,
    **CLIP_PIXELS,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
"""The settings of Qwen2VLImageProcessor, for those that a checkpoint leaves out."""
_MESSAGE_TEMPLATE = (
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The chat template of a message, and the end of the loop over messages."""
Patch = Annotated[int, Bounds(1, 256)]


class _Edges(TypedDict, total=False):
    shortest_edge: LeastPixels | None
    longest_edge: Pixels | None


class _ProcessorFields(PixelFields, total=False):
    size: _Edges | None
    min_pixels: LeastPixels | None
    max_pixels: Pixels | None
    patch_size: Patch | None
    temporal_patch_size: Patch | None
    merge_size: Patch | None
    # For clips, which may have no file of their own.
    cap_pixels_per_frame: bool | None
    fps: FrameRate | None
    min_frames: Frames | None
    max_frames: Frames | None


class _AxialFields(TypedDict, total=False):
    rope_type: Name
    rope_theta: Theta


class TowerFields(TypedDict, total=False):
    """Fields of every Qwen tower's configuration."""

    model_type: Name
    depth: Heads
    num_heads: Heads
    hidden_size: Hidden
    hidden_act: Name
    in_channels: Annotated[int, Bounds(3, 3)]
    in_chans: Annotated[int, Bounds(3, 3)]
    patch_size: Patch
    spatial_merge_size: Patch
    temporal_patch_size: Patch
    rope_parameters: _AxialFields | None


class _WindowedFields(TowerFields, total=False):
    intermediate_size: Inner
    out_hidden_size: Hidden
    window_size: Annotated[int, Bounds(1, 1024)]
    fullatt_block_indexes: Annotated[list[Annotated[int, Bounds(0, 1024)]], Bounds(0, 1024)]
    tokens_per_second: Annotated[Number, Bounds(1, 1000)]


class TokenFields(ConfigFields, total=False):
    """Fields of every Qwen config.json, without the sections for tower and decoder."""

    image_token_id: Token
    video_token_id: Token
    vision_start_token_id: Token
    vision_end_token_id: Token


class FlatFields(TokenFields, DecoderFields, total=False):
    """Fields of Qwen2-VL and Qwen2.5-VL: published checkpoints have the decoder's settings at the top."""

    text_config: TextFields | None


class _ConfigFields(FlatFields, total=False):
    vision_config: _WindowedFields | None


class Qwen25VL(LlamaShaped):
    """A `Qwen2_5_VLForConditionalGeneration` configuration."""

    name = "qwen2.5-vl"
    tower: type[QwenVision] = QwenVision
    groups_are_frames = True
    activation = "silu"
    image_defaults: Mapping[str, Any] = _IMAGE_DEFAULTS
    image_processors: Sequence[str] = ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor")
    """The names of supported image processors. Each name may end in `Fast`."""
    config_fields: type = _ConfigFields
    processor_fields: type = _ProcessorFields
    video_fields: type = _ProcessorFields
    width_setting = "out_hidden_size"
    """The name of the setting for the width after the merger."""
    chat_template = (
        "{% for message in messages %}"
        "{% if loop.first and message['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}" + _MESSAGE_TEMPLATE
    )

    def __init__(self, source: str, config: Mapping[str, Any], salience: str | None = None) -> None:
        super().__init__(source, config)
        vision, text = self._config.vision_config, self._config.text_config
        self.video_token = self._config.video_token_id
        self.vision = self._read_vision(vision, from_end=1 if salience == "last" else 2)
        self.visual_width = self.vision.out_size
        sections, half = self.language_model.rope_sections, head_dim(text) // 2
        head = self.vision.hidden_size / self.vision.num_heads
        self._check(
            [
                (f"mrope_section adds up to {half}", sum(sections) == half, list(sections)),
                ("a vision head's size is a multiple of 4", head > 0 and head % 4 == 0, head),
                ("the vision tower has two blocks at least", vision.depth >= 2, vision.depth),
            ]
        )

    @property
    def special_tokens(self) -> SpecialTokens:
        # The tokens of the chat template. The id of im_start is the one before im_end.
        config, eos = self._config, self._config.text_config.eos_token_id
        # Without an id, -1 is rejected below.
        end = next(iter(eos), -1) if isinstance(eos, list) else -1 if eos is None else eos
        texts = {
            end - 1: "<|im_start|>",
            end: "<|im_end|>",
            config.vision_start_token_id: "<|vision_start|>",
            config.vision_end_token_id: "<|vision_end|>",
            config.image_token_id: "<|image_pad|>",
            config.video_token_id: "<|video_pad|>",
        }
        return SpecialTokens(self._special_tokens(texts, 6), bos="", eos="<|im_end|>")

    def graphs(self, segments: Sequence[range], held: Container[str]) -> dict[str, WriteGraph]:
        return {"vision": partial(build_vision, vision=self.vision), **super().graphs(segments, held)}

    def processor(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        size = {key: pixels for key, pixels in (settings.get("size") or {}).items() if pixels is not None}
        known = dict(self.image_defaults)
        known["min_pixels"] = size.get("shortest_edge", known["min_pixels"])
        known["max_pixels"] = size.get("longest_edge", known["max_pixels"])
        known |= {key: value for key, value in without_null(settings).items() if key in known}
        vision, kind = self.vision, str(known["image_processor_type"])
        expectations = [
            ("image_processor_type", kind.removesuffix("Fast"), self.image_processors),
            ("do_resize", known["do_resize"], (True,)),
            ("patch_size", known["patch_size"], (vision.patch_size,)),
            ("temporal_patch_size", known["temporal_patch_size"], (vision.temporal_patch_size,)),
            ("merge_size", known["merge_size"], (vision.merge_size,)),
        ]
        self._check_settings(expectations)
        least, most, token = known["min_pixels"], known["max_pixels"], self.pixels_each
        if not (isinstance(least, int) and isinstance(most, int) and 0 < least <= most and token <= most):
            raise self._error(
                f"images may have {least!r} to {most!r} pixels, expected two whole "
                f"numbers, the second no smaller than the first and than the {token} pixels of a token. "
                "Correct min_pixels and max_pixels, or give --min-pixels and --max-pixels."
            )
        if "max_frames" in settings:
            known["video"] = self._video(settings, known)
        return known

    def tokens_of(self, processor: Mapping[str, Any]) -> VariableTokens:
        image = self._most_tokens(processor)
        frame: int = processor["video"]["most_tokens"] if "video" in processor else 0
        in_all = max(image, frame * self.groups_of(processor))
        return VariableTokens(max(image, frame), self.pixels_each, in_all, self._tower_flops)

    def groups_of(self, processor: Mapping[str, Any]) -> int:
        # The frames that the model sees at once are one group, and so is an image.
        frames: int = processor["video"]["max_frames"] if "video" in processor else 1
        return -(-frames // self.vision.temporal_patch_size)

    def _tower_flops(self, tokens: int) -> int:
        """Return the tower's FLOPs on a square image of so many tokens, all of whose windows are whole."""
        tower, full = self.vision, len(self.vision.full_attention_blocks)
        patches = tokens * tower.patches_per_token
        window = min(patches, tower.window_side**2 * tower.patches_per_token)
        pairs = patches * (full * patches + (tower.num_blocks - full) * window)
        return qwen_tower_flops(tower, patches, pairs, mlp_matrices=tower.mlp_matrices, mergers=tower.mergers)

    def _most_tokens(self, limits: Mapping[str, Any]) -> int:
        """Return the most tokens of an image within `limits`.

        Sides are rounded to whole tokens. Where a side would round to none, or a small image is enlarged, an image of
        the longest shape (200:1) may get more tokens than fit into max_pixels.
        """
        each = self.pixels_each
        least, most = limits["min_pixels"] // each + 1, limits["max_pixels"] // each
        rounded_up = least + isqrt(200 * least) + 1 + isqrt(least) + 1
        return max(most, isqrt(200 * (most + 1)), rounded_up)

    def _video(self, settings: Mapping[str, Any], image: Mapping[str, Any]) -> dict[str, Any]:
        """Return the limits of a clip's frames, and how clips are sampled (qwen-vl-utils' defaults).

        Like transformers, this reads preprocessor_config.json where a checkpoint has no file for videos. Raises
        `UsageError` and `CheckpointError`.
        """
        given = settings.get("video_processor") or settings
        given = {key: value for key, value in given.items() if value is not None}
        fixed = {"do_resize": True, "resample": 3, "cap_pixels_per_frame": False}
        fixed |= {key: image[key] for key in (*CLIP_PIXELS, *_PATCHES)}
        expectations = [(f"{key} of videos", given[key], (fixed[key],)) for key in fixed if key in given]
        self._check_settings(expectations)
        frames, together = settings["max_frames"], self.vision.temporal_patch_size
        if frames < together:
            raise UsageError(
                f"--max-frames is {frames}, expected at least {together}: the model sees so many frames at once."
            )
        sampling = {
            "fps": float(given.get("fps") or 2),
            "min_frames": given.get("min_frames") or 4,
            "max_frames": min(frames, given.get("max_frames") or 768),
        }
        groups, most = -(-sampling["max_frames"] // together), image["max_pixels"]
        if "clip_pixels" in settings:
            most = min(most, max(self.pixels_each, settings["clip_pixels"] // groups))
        limits, of_a_frame = self._clip_limits(given, sampling["max_frames"], most)
        each, most = self.pixels_each, limits["max_pixels"]
        self._check([(f"a frame of a clip may have the {each} pixels of a token", each <= most, most)])
        return {**limits, "most_tokens": self._most_tokens(of_a_frame), **sampling}

    def _clip_limits(self, given: Mapping[str, Any], frames: int, most: int) -> tuple[dict[str, int], dict[str, int]]:
        """Return Qwen2VLVideoProcessor's limits for clips of up to `frames` frames, and those of one frame: the same.

        `given` are the checkpoint's settings. No frame has more than `most` pixels.
        """
        size, each = given.get("size") or {}, self.pixels_each
        most = min(given.get("max_pixels") or size.get("longest_edge") or 768 * each, most)
        least = min(given.get("min_pixels") or size.get("shortest_edge") or 128 * each, most)
        limits = {"min_pixels": least, "max_pixels": most}
        return limits, limits

    @property
    def pixels_each(self) -> int:
        return (self.vision.patch_size * self.vision.merge_size) ** 2

    def _settings(self) -> list[Setting]:
        text, vision, kind = self._config.text_config, self._config.vision_config, FAMILIES[self.name].model_type
        width = self.width_setting
        return [
            ("text_config.model_type", text.model_type, (f"{kind}_text",)),
            ("text_config.use_sliding_window", bool(getattr(text, "use_sliding_window", None)), (False,)),
            ("vision_config.in_channels", vision.in_channels, (3,)),
            ("vision_config.model_type", vision.model_type, (f"{kind}_vision",)),
            ("vision_config.hidden_act", vision.hidden_act, (self.activation,)),
            (f"vision_config.{width}", getattr(vision, width), (text.hidden_size,)),
        ]

    def _read_llama(self, text: Any) -> Llama:
        facts = read_language_model(text, text.rope_parameters.get("mrope_section") or ())
        # The model's code fixes which projections have biases.
        return Llama(facts, text.rms_norm_eps, qkv_bias=True, output_bias=False, mlp_bias=False)

    def _read_vision(self, vision: Any, from_end: int) -> QwenVision:
        """Return the tower. Its salience is that of the block at this place from the end."""
        return self.tower(
            num_heads=vision.num_heads,
            num_blocks=vision.depth,
            patch_size=vision.patch_size,
            temporal_patch_size=vision.temporal_patch_size,
            merge_size=vision.spatial_merge_size,
            rope_theta=float(vision.rope_parameters["rope_theta"]),
            out_size=getattr(vision, self.width_setting),
            salience_block=vision.depth - from_end,
            **self._own_facts(vision),
        )

    def _own_facts(self, vision: Any) -> dict[str, Any]:
        """Return the tower's facts whose settings differ between versions of the model; raises `CheckpointError`."""
        window, unit = vision.window_size, vision.patch_size * vision.spatial_merge_size
        self._check([(f"window_size is a multiple of {unit} pixels", window % unit == 0, window)])
        return {
            "hidden_size": vision.hidden_size,
            "intermediate_size": vision.intermediate_size,
            "full_attention_blocks": tuple(block for block in vision.fullatt_block_indexes if block < vision.depth),
            "window_side": window // unit,
            "tokens_per_second": vision.tokens_per_second,
        }


class _VisionFields(TowerFields, total=False):
    embed_dim: Hidden
    mlp_ratio: Annotated[Number, Bounds(1, 64)]


class _Qwen2ConfigFields(FlatFields, total=False):
    vision_config: _VisionFields | None


class Qwen2VL(Qwen25VL):
    """A `Qwen2VLForConditionalGeneration` configuration."""

    name = "qwen2-vl"
    tower = Qwen2Vision
    activation = "quick_gelu"
    width_setting = "hidden_size"
    config_fields = _Qwen2ConfigFields

    def _own_facts(self, vision: Any) -> dict[str, Any]:
        return {
            "hidden_size": vision.embed_dim,
            "intermediate_size": int(vision.embed_dim * vision.mlp_ratio),
            "full_attention_blocks": tuple(range(vision.depth)),
            "window_side": 0,
            "tokens_per_second": None,
        }


class _Qwen3RopeFields(RopeFields, total=False):
    mrope_interleaved: bool


class _Qwen3TextFields(TextFields, total=False):
    rope_scaling: _Qwen3RopeFields | None  # type: ignore[misc]
    rope_parameters: _Qwen3RopeFields | None  # type: ignore[misc]


class _Qwen3VisionFields(TowerFields, total=False):
    intermediate_size: Inner
    out_hidden_size: Hidden
    num_position_embeddings: Annotated[int, Bounds(1, 1 << 20)]
    deepstack_visual_indexes: Annotated[list[Annotated[int, Bounds(0, 1024)]], Bounds(0, 1024)]


class _Qwen3ConfigFields(TokenFields, total=False):
    vision_config: _Qwen3VisionFields | None
    text_config: _Qwen3TextFields | None


class Qwen3VL(Qwen25VL):
    """A `Qwen3VLForConditionalGeneration` configuration, without a mixture of experts."""

    name = "qwen3-vl"
    tower = Qwen3Vision
    activation = "gelu_pytorch_tanh"
    deepstack = _DEEPSTACK
    config_fields = _Qwen3ConfigFields
    image_defaults: Mapping[str, Any] = {**_IMAGE_DEFAULTS, "patch_size": 16}
    image_processors = ("Qwen2VLImageProcessor",)
    chat_template = f"{{% for message in messages %}}{_MESSAGE_TEMPLATE}"

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
