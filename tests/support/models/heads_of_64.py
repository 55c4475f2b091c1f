"""Small models that TensorRT compiles: its attention takes no heads smaller than 64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx

from sinkprune.contract.bundle import Bundle, read_bundle
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.checkpoint.presets import PRESETS
from sinkprune.export.source import ExportRequest
from support.models.peer_shapes import siglip_config, sizes

_TEXT: dict[str, Any] = {**sizes(256, 320, 4, 4, 2), "vocab_size": 320}
CONFIG: dict[str, Any] = {
    "model_type": "llava",
    "image_token_index": 300,
    "vision_config": {
        **sizes(128, 256, 3, 2),
        "model_type": "clip_vision_model",
        "image_size": 336,
        "patch_size": 14,
    },
    "text_config": {**_TEXT, "model_type": "llama"},
}
NEXT_CONFIG: dict[str, Any] = {
    **CONFIG,
    "model_type": "llava_next",
    "text_config": {**_TEXT, "model_type": "mistral", "sliding_window": None, "head_dim": 64},
}
# Sixteen tokens a tile
_TILES = {"model_type": "internvl_vision", "attention_bias": True, "image_size": [112, 112]}
INTERNVL_CONFIG: dict[str, Any] = {
    "model_type": "internvl",
    "image_token_id": 303,
    "image_seq_length": 16,
    "vision_config": {**sizes(128, 256, 2, 2), **_TILES},
    "text_config": {**_TEXT, "model_type": "qwen3", "head_dim": 64, "eos_token_id": 300},
}
# The tower's heads are 80, as in the real model.
_WINDOWS = {"depth": 4, "hidden_size": 160, "intermediate_size": 212, "fullatt_block_indexes": [1, 3]}
_MARKS = {"image_token_id": 300, "video_token_id": 301, "vision_start_token_id": 302, "vision_end_token_id": 303}
_ROPE = {"rope_type": "default", "rope_theta": 1e6}
QWEN_CONFIG: dict[str, Any] = {
    **_MARKS,
    "model_type": "qwen2_5_vl",
    "vision_config": {**_WINDOWS, "num_heads": 2, "out_hidden_size": 256},
    "text_config": {**_TEXT, "eos_token_id": 305, "rope_parameters": {**_ROPE, "mrope_section": [8, 12, 12]}},
}
QWEN2_CONFIG: dict[str, Any] = {
    **QWEN_CONFIG,
    "model_type": "qwen2_vl",
    "vision_config": {"depth": 3, "embed_dim": 160, "mlp_ratio": 2, "num_heads": 2, "hidden_size": 256},
}
# Deep enough that the decoder is cut behind the layers that DeepStack adds to; 72 is the head of the 8B's tower.
_DEEPSTACK = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1, 2], "out_hidden_size": 128}
QWEN3_CONFIG: dict[str, Any] = {
    **_MARKS,
    "model_type": "qwen3_vl",
    "vision_config": {"depth": 4, "hidden_size": 144, "intermediate_size": 160, "num_heads": 2, **_DEEPSTACK},
    "text_config": {
        **sizes(128, 160, 24, 2, 1),
        "head_dim": 64,
        "vocab_size": 320,
        "eos_token_id": 305,
        "rope_parameters": {**_ROPE, "mrope_section": [12, 10, 10]},
    },
}
# Heads of the tower and of the decoder are 72 and 256, as in the real model. The last segment has a single layer,
# which gives keys and values only.
_GEMMA: dict[str, Any] = {"model_type": "gemma", "head_dim": 256, "vocab_size": 320}
PI0_CONFIG: dict[str, Any] = {
    "model_type": "pi0",
    "vlm_config": {
        "model_type": "paligemma",
        "image_token_id": 320,
        "projection_dim": 256,
        "text_config": {**_GEMMA, **sizes(256, 320, 4, 2, 1)},
        "vision_config": siglip_config(224, 256, sizes(144, 288, 3, 2)),
    },
    "dit_config": {**_GEMMA, **sizes(128, 192, 4, 2, 1)},
    "chunk_size": 10,
}
PALIGEMMA_CONFIG: dict[str, Any] = PI0_CONFIG["vlm_config"]
# The code of OpenVLA names tokens of Llama's vocabulary. SigLIP's heads are 72, as in the real model.
OPENVLA_CONFIG: dict[str, Any] = {
    **PRESETS["openvla-7b"],
    "timm_model_args": [
        {"embed_dim": width, "depth": 4, "num_heads": 2, "mlp_ratio": 2.0, "reg_tokens": registers}
        for width, registers in ((128, 4), (144, 0))
    ],
    "text_config": {**CONFIG["text_config"], "num_key_value_heads": 4, "vocab_size": 32064},
}
OFT_CONFIG: dict[str, Any] = {
    **OPENVLA_CONFIG,
    **{name: PRESETS["openvla-7b-oft"][name] for name in ("model_type", "action_head")},
}
PI05_CONFIG: dict[str, Any] = {**PI0_CONFIG, "model_type": "pi05"}


def export_random(folder: Path, config: dict[str, Any] = CONFIG, **request: Any) -> Bundle:
    """A bundle of `config` with random weights, written into `folder`; `request` is `ExportRequest`'s."""
    (folder / "config.json").write_text(json.dumps(config))
    export_bundle(ExportRequest(str(folder), random_weights=True, **request), folder / "bundle")
    return read_bundle(folder / "bundle")


def operators(bundle: Bundle, graph: str) -> tuple[tuple[str, ...], ...]:
    """The operators of a graph and of its functions, in order, each with the names of its attributes."""
    model = onnx.load(bundle.path / bundle.manifest.graphs[graph].file, load_external_data=False)
    return tuple(
        tuple(f"{node.op_type} {sorted(attribute.name for attribute in node.attribute)}" for node in part.node)
        for part in (model.graph, *model.functions)
    )
