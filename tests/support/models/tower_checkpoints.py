"""Small random vision towers in Hugging Face format, with tokens of large norm planted where it is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SIZE = 56
PATCHES = 16
PLANTED = (5, 11)
"""The patches that are given large norms, of 16."""

_COMMON = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": SIZE,
    "patch_size": 14,
}
_CROPPED = {"size": {"shortest_edge": SIZE}, "crop_size": {"height": SIZE, "width": SIZE}}
KINDS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "clip_vision_model": ("CLIPVisionConfig", "CLIPVisionModel", "CLIPImageProcessorPil", _CROPPED),
    "siglip_vision_model": (
        "SiglipVisionConfig",
        "SiglipVisionModel",
        "SiglipImageProcessorPil",
        {"size": {"height": SIZE, "width": SIZE}},
    ),
    "dinov2": ("Dinov2Config", "Dinov2Model", "BitImageProcessorPil", _CROPPED),
    "dinov2_with_registers": (
        "Dinov2WithRegistersConfig",
        "Dinov2WithRegistersModel",
        "BitImageProcessorPil",
        _CROPPED,
    ),
}
"""Classes of transformers, and the processor's settings, by model type."""


@torch.no_grad()
def make_tower(folder: Path, kind: str, planted: tuple[int, ...] = PLANTED) -> Any:
    """Write a tower whose first block lifts the norms of the `planted` patches; returns it, in eager attention."""
    torch.manual_seed(0)
    config, model, processor, settings = KINDS[kind]
    tower = getattr(transformers, model)(getattr(transformers, config)(**_COMMON)).eval()
    tower.set_attn_implementation("eager")
    direction = torch.ones(32)
    direction[::2] = -1
    embeddings = tower.embeddings
    places = getattr(embeddings, "position_embeddings", None)
    table = embeddings.position_embedding.weight if places is None else places[0]
    in_front = len(table) - PATCHES
    for patch in planted:
        table[in_front + patch] = 30 * direction
    first = first_block(tower).mlp
    # A neuron that answers to that direction alone, and writes a long vector.
    first.fc1.weight[0], first.fc1.bias[0] = direction / 4, -6
    first.fc2.weight[:, 0] = torch.randn(32) * 20
    tower.save_pretrained(folder)
    getattr(transformers, processor)(**settings).save_pretrained(folder)
    return tower


def first_block(tower: Any) -> Any:
    """The first block of a tower of any of these kinds."""
    return blocks(tower)[0]


def blocks(tower: Any) -> Any:
    """All blocks."""
    return getattr(tower.encoder, "layers", None) or tower.encoder.layer
