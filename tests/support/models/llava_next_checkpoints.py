"""Small random LLaVA-NeXT checkpoints in Hugging Face format, as `save_pretrained` writes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlavaNextConfig, LlavaNextForConditionalGeneration, LlavaNextImageProcessorPil

from support.models.checkpoints import IMAGE_TOKEN, TEMPLATE, VOCAB, tokenizer

SIDE = 112
# As the published checkpoints have them, for tiles of 112 pixels
PINPOINTS = [[112, 224], [224, 112], [224, 224], [336, 112], [112, 336]]


@dataclass(frozen=True)
class NextShape:
    """What the small checkpoints differ in."""

    decoder: str = "llama"
    num_layers: int = 6
    num_kv_heads: int = 4


def make_llava_next_checkpoint(folder: Path, shape: NextShape, seed: int = 0) -> Path:
    """A LLaVA-NeXT checkpoint with random weights, tokenizer, processor and chat template."""
    torch.manual_seed(seed)
    text: dict[str, Any] = {"sliding_window": None} if shape.decoder == "mistral" else {}
    config = LlavaNextConfig(
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "image_size": SIDE,
            "patch_size": 14,
            "initializer_factor": 4.0,
        },
        text_config={
            "model_type": shape.decoder,
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": shape.num_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": shape.num_kv_heads,
            "vocab_size": VOCAB,
            "max_position_embeddings": 1024,
            # Large enough that attention is far from uniform and logits far from tied.
            "initializer_range": 0.2,
            **text,
        },
        image_token_index=IMAGE_TOKEN,
        image_grid_pinpoints=PINPOINTS,
    )
    model = LlavaNextForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    LlavaNextImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}, image_grid_pinpoints=PINPOINTS
    ).save_pretrained(folder)
    return folder
