"""Small random PaliGemma checkpoints in Hugging Face format."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

from support.models.peer_shapes import sizes
from support.models.pi0_checkpoints import IMAGE_TOKEN, draw_weights, pi0_tokenizer, siglip_config, siglip_pixels


@dataclass(frozen=True)
class PaliGemmaShape:
    """What the small checkpoints of PaliGemma differ in."""

    image_size: int = 112
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 1
    vocab_size: int = 384
    image_token: int = IMAGE_TOKEN
    tied: bool = True
    bias: bool = False
    """Whether the projections of attention have biases."""


def make_paligemma_checkpoint(folder: Path, shape: PaliGemmaShape, seed: int = 0) -> Path:
    """Write a checkpoint with random weights, tokenizer and image processor, but no chat template, into `folder`."""
    torch.manual_seed(seed)
    model = PaliGemmaForConditionalGeneration(paligemma_config(shape)).eval()
    draw_weights(model, model.model.language_model)
    with torch.no_grad():
        # Few answers have bytes that are no text, of which transformers decodes a whole run at once.
        model.lm_head.weight[4:260] *= 0.2
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    pi0_tokenizer().save_pretrained(folder)
    size = shape.image_size
    processor = {
        "image_processor_type": "SiglipImageProcessor",
        "processor_class": "PaliGemmaProcessor",
        "do_convert_rgb": None,
        **siglip_pixels(size),
        "size": {"height": size, "width": size},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def paligemma_config(shape: PaliGemmaShape) -> PaliGemmaConfig:
    """The configuration of a small PaliGemma."""
    return PaliGemmaConfig(
        projection_dim=72,
        image_token_index=shape.image_token,
        tie_word_embeddings=shape.tied,
        text_config={
            "model_type": "gemma",
            **sizes(72, 96, shape.num_layers, shape.num_heads, shape.num_kv_heads),
            "head_dim": 16,
            "vocab_size": shape.vocab_size,
            "attention_bias": shape.bias,
            "max_position_embeddings": 1024,
        },
        vision_config=siglip_config(shape.image_size, 72),
    )
