"""Small random InternVL checkpoints in Hugging Face format, as `save_pretrained` writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import InternVLConfig
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from support.models.checkpoints import save_random_model, small_decoder
from support.models.peer_shapes import sizes
from support.models.qwen_checkpoints import ENDS, qwen_tokenizer
from support.models.qwen_checkpoints import SPECIALS as QWEN_SPECIALS

IMAGE_TOKEN = 375
SPECIALS = {**QWEN_SPECIALS, 373: "<img>", 374: "</img>", 375: "<IMG_CONTEXT>", 376: "<video>"}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}<IMG_CONTEXT>\n{% elif item['type'] == 'video' %}<video>\n"
    "{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Writes what the template of the published checkpoints writes, by notes about them."""
COLOURS = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
_ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


@dataclass(frozen=True)
class InternVLShape:
    """What the small checkpoints of InternVL differ in."""

    image_size: int = 168
    """Pixels along a side of a tile: 36 tokens."""
    ratio: float = 0.5
    num_layers: int = 6
    num_kv_heads: int = 2
    tied: bool = False
    text: Mapping[str, Any] = field(default_factory=lambda: {"model_type": "qwen2", "rope_parameters": _ROPE})
    vision: Mapping[str, Any] = field(default_factory=lambda: {"attention_bias": True})
    """What the decoder's and the tower's configurations have in addition."""
    tiles: tuple[int, int] = (1, 4)
    """The fewest and the most of an image."""


def make_internvl_checkpoint(folder: Path, shape: InternVLShape, seed: int = 0) -> Path:
    """Write a checkpoint with random weights, tokenizer, processors and chat template."""
    side, square = shape.image_size, {"height": shape.image_size, "width": shape.image_size}
    config = InternVLConfig(
        vision_config={**sizes(48, 96, 3, 4), "image_size": [side, side], "initializer_range": 0.1, **shape.vision},
        text_config={**small_decoder(shape.num_layers, shape.num_kv_heads), **ENDS, **shape.text},
        image_token_id=IMAGE_TOKEN,
        image_seq_length=int((side // 14 * shape.ratio) ** 2),
        downsample_ratio=shape.ratio,
        tie_word_embeddings=shape.tied,
    )
    roles = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    tokenizer = qwen_tokenizer(specials=SPECIALS, extra_special_tokens={**roles, "video_token": "<video>"})
    moved = ("cls_token", "position_embeddings", "lambda_", "norm")
    save_random_model(folder, config, tokenizer, TEMPLATE, 372, seed, moved)
    least, most = shape.tiles
    GotOcr2ImageProcessorPil(size=square, min_patches=least, max_patches=most, **COLOURS).save_pretrained(folder)
    clips = {"video_processor_type": "InternVLVideoProcessor", "size": square, **COLOURS}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(clips), encoding="utf-8")
    return folder
