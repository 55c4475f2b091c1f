"""Qwen2.5-VL: a windowed vision tower for any resolution that ends in the decoder's width, and a Qwen2 decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any

from sinkprune.contract.errors import CheckpointError, UsageError
from sinkprune.contract.families import FAMILIES
from sinkprune.export.families import Family
from sinkprune.export.families.configuration import (
    Expectation,
    check_settings,
    check_shapes,
    head_dim,
    parse_config,
    read_language_model,
)
from sinkprune.export.graph import WeightedGraph, Weights
from sinkprune.export.llama import Llama, build_head, build_segment
from sinkprune.export.pruning.plan import UpTo
from sinkprune.export.qwen2_5_vision import QWEN2_5, QwenVision, build_vision
from sinkprune.export.text import SpecialTokens

# What frames and images have in common
_OF_PIXELS = (
    "do_rescale",
    "rescale_factor",
    "do_normalize",
    "image_mean",
    "image_std",
    "patch_size",
    "temporal_patch_size",
    "merge_size",
)


class Qwen25VL(Family):
    """A `Qwen2_5_VLForConditionalGeneration` configuration."""

    name = "qwen2.5-vl"
    parts = QWEN2_5
    embedding = "language_model.embed_tokens.weight"
    projector: str | None = None
    groups_are_frames = True
    extra_rows: Mapping[str, str] = {}
    chat_template = (
        "{% for message in messages %}"
        "{% if loop.first and message['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
        "{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{% for content in message['content'] %}"
        "{% if content['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
        "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}"
        "{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )

    def __init__(self, source: str, config: Mapping[str, Any], salience: str | None = None) -> None:
        """`salience` is the block whose attention it is, `penultimate` unless `last` is given."""
        self._source = source
        self._config: Any = parse_config(source, self._config_class(), config)
        self._check()
        text = self._config.text_config
        facts = read_language_model(text, text.rope_parameters["mrope_section"])
        # The model's code fixes which projections have biases.
        self._decoder = Llama(facts, text.rms_norm_eps, qkv_bias=True, output_bias=False, mlp_bias=False)
        self.vision = self._vision = self._read_vision(
            self._config.vision_config, behind=1 if salience == "last" else 2
        )
        self.language_model = facts
        self.visual_width = self._vision.out_size
        self.image_token: int = self._config.image_token_id

    def _config_class(self) -> Any:
        from transformers import Qwen2_5_VLConfig

        return Qwen2_5_VLConfig

    @property
    def special_tokens(self) -> SpecialTokens:
        # Those that the chat template writes; im_start stands before im_end.
        config, eos = self._config, self._config.text_config.eos_token_id
        end = eos[0] if isinstance(eos, list) else eos
        texts = {
            end - 1: "<|im_start|>",
            end: "<|im_end|>",
            config.vision_start_token_id: "<|vision_start|>",
            config.vision_end_token_id: "<|vision_end|>",
            config.image_token_id: "<|image_pad|>",
            config.video_token_id: "<|video_pad|>",
        }
        if len(texts) < 6 or not all(0 <= token < self.language_model.vocab_size for token in texts):
            raise CheckpointError(
                f"checkpoint '{self._source}': the special tokens of config.json have the ids {sorted(texts)}, "
                f"expected six different ones below {self.language_model.vocab_size}. Mend eos_token_id and the rest."
            )
        return SpecialTokens(texts, bos="", eos="<|im_end|>")

    @property
    def default_processor(self) -> dict[str, Any]:
        """The settings of Qwen2VLImageProcessor: what a checkpoint leaves out."""
        return {
            "image_processor_type": "Qwen2VLImageProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "resample": 3,
            "min_pixels": 56 * 56,
            "max_pixels": 28 * 28 * 1280,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
        }

    @property
    def parameters(self) -> int:
        lm = self.language_model
        biases = lm.num_layers * (lm.num_heads + 2 * lm.num_kv_heads) * lm.head_dim
        return self._vision.parameters + lm.decoder_parameters + biases + (2 * lm.vocab_size + 1) * lm.hidden_size

    def graphs(self, segments: Sequence[range]) -> list[str]:
        return ["vision", *(f"decoder_{s}" for s in range(len(segments))), "head"]

    def build(self, name: str, graph: WeightedGraph, segments: Sequence[range], weights: Weights) -> None:
        if name == "vision":
            build_vision(graph, self._vision, self.parts)
        elif name == "head":
            tied = self._config.tie_word_embeddings and "lm_head.weight" not in weights
            lm_head = self.embedding.removesuffix(".weight") if tied else "lm_head"
            build_head(graph, self._decoder, lm_head)
        else:
            build_segment(graph, self._decoder, segments[int(name.removeprefix("decoder_"))])

    def processor(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        # processor_config.json nests what preprocessor_config.json holds at the top
        settings = {**settings.get("image_processor", {}), **settings}
        size = settings.get("size") or {}
        known = {**self.default_processor}
        known["min_pixels"] = size.get("shortest_edge", known["min_pixels"])
        known["max_pixels"] = size.get("longest_edge", known["max_pixels"])
        known |= {key: settings[key] for key in known if settings.get(key) is not None}
        vision, kind = self._vision, str(known["image_processor_type"])
        expectations = [
            (
                "image_processor_type",
                kind.removesuffix("Fast"),
                ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor"),
            ),
            ("do_resize", known["do_resize"], (True,)),
            ("patch_size", known["patch_size"], (vision.patch_size,)),
            ("temporal_patch_size", known["temporal_patch_size"], (vision.temporal_patch_size,)),
            ("merge_size", known["merge_size"], (vision.merge_size,)),
        ]
        check_settings(self._source, FAMILIES[self.name].architecture, expectations)
        least, most, token = known["min_pixels"], known["max_pixels"], self._pixels_each
        if not (isinstance(least, int) and isinstance(most, int) and 0 < least <= most and token <= most):
            raise CheckpointError(
                f"checkpoint '{self._source}': images may have {least!r} to {most!r} pixels, expected two whole "
                f"numbers, the second no smaller than the first and than the {token} pixels of a token. "
                "Mend min_pixels and max_pixels, or give --min-pixels and --max-pixels."
            )
        if "max_frames" in settings:
            known["video"] = self._video(settings, known)
        return known

    def tokens_of(self, processor: Mapping[str, Any]) -> UpTo:
        image = self._most_tokens(processor)
        frame: int = processor["video"]["most_tokens"] if "video" in processor else 0
        return UpTo(max(image, frame), self._pixels_each, max(image, frame * self.groups_of(processor)))

    def groups_of(self, processor: Mapping[str, Any]) -> int:
        # The frames that are seen at once are one group; an image is one too.
        frames: int = processor["video"]["max_frames"] if "video" in processor else 1
        return -(-frames // self._vision.temporal_patch_size)

    def _most_tokens(self, limits: Mapping[str, Any]) -> int:
        """The most tokens of an image within `limits`.

        Sides are rounded to whole tokens. Where one would round to none, or small images are rounded up, an image of
        the longest shape (200:1) may get more tokens than max_pixels has room for.
        """
        each = self._pixels_each
        least, most = limits["min_pixels"] // each + 1, limits["max_pixels"] // each
        rounded_up = least + isqrt(200 * least) + 1 + isqrt(least) + 1
        return max(most, isqrt(200 * (most + 1)), rounded_up)

    def _video(self, settings: Mapping[str, Any], image: Mapping[str, Any]) -> dict[str, Any]:
        """Qwen2VLVideoProcessor's settings of a frame's pixels, and how clips are sampled (qwen-vl-utils' defaults).

        transformers reads them from preprocessor_config.json too, where a checkpoint has no file of their own.
        """
        given = settings.get("video_processor") or settings
        given = {key: value for key, value in given.items() if value is not None}
        fixed = {"do_resize": True, "resample": 3, "cap_pixels_per_frame": False}
        fixed |= {key: image[key] for key in _OF_PIXELS}
        expectations = [(f"{key} of videos", given[key], (fixed[key],)) for key in fixed if key in given]
        check_settings(self._source, FAMILIES[self.name].architecture, expectations)
        frames, together = settings["max_frames"], self._vision.temporal_patch_size
        if frames < together:
            raise UsageError(
                f"--max-frames is {frames}, expected at least {together}: the model sees so many frames at once."
            )
        size, each = given.get("size") or {}, self._pixels_each
        most = min(given.get("max_pixels") or size.get("longest_edge", 768 * each), image["max_pixels"])
        limits = {
            "min_pixels": min(given.get("min_pixels") or size.get("shortest_edge", 128 * each), most),
            "max_pixels": most,
        }
        return {
            **limits,
            "most_tokens": self._most_tokens(limits),
            "fps": float(given.get("fps") or 2),
            "min_frames": given.get("min_frames") or 4,
            "max_frames": min(frames, given.get("max_frames") or 768),
        }

    @property
    def _pixels_each(self) -> int:
        return (self._vision.patch_size * self._vision.merge_size) ** 2

    def _check(self) -> None:
        """Refuse what these graphs do not compute, setting by setting."""
        config, text, vision = self._config, self._config.text_config, self._config.vision_config
        rope = text.rope_parameters or {}
        sections = rope.get("mrope_section") or []
        settings = [
            ("text_config.model_type", text.model_type, (f"{FAMILIES[self.name].model_type}_text",)),
            ("text_config.hidden_act", text.hidden_act, ("silu",)),
            ("text_config.use_sliding_window", bool(text.use_sliding_window), (False,)),
            ("text_config.rope_parameters.rope_type", rope.get("rope_type", "default"), ("default",)),
            ("vision_config.in_channels", vision.in_channels, (3,)),
            *self._vision_settings(vision, text),
            ("quantization_config", getattr(config, "quantization_config", None), (None,)),
        ]
        check_settings(self._source, FAMILIES[self.name].architecture, settings)
        check_shapes(self._source, text, config.image_token_id)
        head = _vision_head(self._vision_width(vision), vision.num_heads)
        expectations = [
            (f"mrope_section adds up to {head_dim(text) // 2}", sum(sections) == head_dim(text) // 2, sections),
            ("a vision head's size is a multiple of 4", head > 0 and head % 4 == 0, head),
            ("the vision tower has two blocks at least", vision.depth >= 2, vision.depth),
            *self._window_expectations(vision),
        ]
        for expectation, holds, found in expectations:
            if not holds:
                raise CheckpointError(
                    f"checkpoint '{self._source}': expected that {expectation}; found {found}. Mend config.json."
                )

    def _vision_settings(self, vision: Any, text: Any) -> list[Expectation]:
        """What is expected of the tower's configuration."""
        return [
            ("vision_config.model_type", vision.model_type, ("qwen2_5_vl_vision",)),
            ("vision_config.hidden_act", vision.hidden_act, ("silu",)),
            ("vision_config.out_hidden_size", vision.out_hidden_size, (text.hidden_size,)),
        ]

    def _window_expectations(self, vision: Any) -> list[tuple[str, bool, Any]]:
        """What windows must be, whether they are, and what was found."""
        unit = vision.patch_size * vision.spatial_merge_size
        return [(f"window_size is a multiple of {unit} pixels", vision.window_size % unit == 0, vision.window_size)]

    def _vision_width(self, vision: Any) -> int:
        """The tower's width."""
        width: int = vision.hidden_size
        return width

    def _read_vision(self, vision: Any, behind: int) -> QwenVision:
        """The tower; its salience is that of the block so many from the end."""
        return QwenVision(
            hidden_size=vision.hidden_size,
            intermediate_size=vision.intermediate_size,
            num_heads=vision.num_heads,
            num_blocks=vision.depth,
            full_attention_blocks=tuple(block for block in vision.fullatt_block_indexes if block < vision.depth),
            window_side=vision.window_size // (vision.patch_size * vision.spatial_merge_size),
            patch_size=vision.patch_size,
            temporal_patch_size=vision.temporal_patch_size,
            merge_size=vision.spatial_merge_size,
            rope_theta=float(vision.rope_parameters["rope_theta"]),
            out_size=vision.out_hidden_size,
            salience_block=vision.depth - behind,
            tokens_per_second=vision.tokens_per_second,
        )


def _vision_head(width: int, heads: int) -> int:
    """The size of a head; 0 where heads do not share the width evenly."""
    return width // heads if width % heads == 0 else 0


FAMILY = Qwen25VL
