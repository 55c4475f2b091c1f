"""Qwen2-VL configurations as they are found, and what is refused of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from PIL import Image
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from sinkprune import Pipeline
from sinkprune.contract.errors import CheckpointError
from sinkprune.contract.families import FAMILIES
from sinkprune.export.families import read_family
from sinkprune.export.presets import PRESETS
from support.models.graphs import parameters_of

# Qwen/Qwen2-VL-7B-Instruct's config.json: the decoder's settings stand at the top.
HUB_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2_vl",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_chans": 3,
        "hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 152064,
}


def test_the_hubs_own_configuration_is_the_7b_preset() -> None:
    hub, preset = read_family("hub", HUB_CONFIG), read_family("preset", PRESETS["qwen2-vl-7b"])
    assert hub.language_model == preset.language_model
    assert hub.language_model.rope_sections == (16, 24, 24)
    assert hub.vision == preset.vision
    assert (hub.vision.intermediate_size, hub.vision.salience_block) == (5120, 30)
    assert FAMILIES[hub.name].budgets == FAMILIES["qwen2.5-vl"].budgets


def test_parameters_are_those_of_transformers() -> None:
    with torch.device("meta"):
        model = Qwen2VLForConditionalGeneration(Qwen2VLConfig.from_dict(copy.deepcopy(PRESETS["qwen2-vl-7b"])))
    preset = read_family("preset", PRESETS["qwen2-vl-7b"])
    assert parameters_of(preset) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("hidden_act", "gelu", "vision_config.hidden_act is 'gelu', expected quick_gelu"),
        ("hidden_size", 100, "vision_config.hidden_size is 100, expected 3584"),
        ("embed_dim", 1281, "a vision head's size is a multiple of 4"),
        ("depth", 1, "two blocks at least"),
    ],
)
def test_towers_these_graphs_do_not_compute(place: str, value: Any, said: str) -> None:
    vision = {**HUB_CONFIG["vision_config"], place: value}
    with pytest.raises(CheckpointError, match=said):
        read_family("hub", {**HUB_CONFIG, "vision_config": vision})


def test_a_tower_without_windows_takes_no_window_tables(
    bundle: Callable[..., Path], pipeline: Callable[..., Pipeline]
) -> None:
    graph = onnx.load(bundle("qwen2-vl") / "graphs/vision.onnx", load_external_data=False).graph
    assert [value.name for value in graph.input] == ["pixel_values", "cos", "sin"]
    family = pipeline("qwen2-vl").family
    d, m, n = 48, 96, 32 * 4
    blocks = 4 * (n * (4 * d * d + 2 * d * m) + 2 * n * n * d)
    merger = n // 4 * ((4 * d) ** 2 + 4 * d * 64)
    assert family.layout(Image.new("RGB", (224, 112))).tower_flops == 2 * (n * 1176 * d + blocks + merger)
