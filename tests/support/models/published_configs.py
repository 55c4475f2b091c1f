"""The config.json and the processor settings of published checkpoints, without fields that no code here names."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from support.models.peer_shapes import sizes

PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
_PROJECTED = {"vision_feature_select_strategy": "default", "projector_hidden_act": "gelu"}
_QWEN_ENDS = {"bos_token_id": 151643, "eos_token_id": 151645}
_QWEN_MARKS = {"vision_start_token_id": 151652, "vision_end_token_id": 151653, "video_token_id": 151656}
_SILU: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-06, "use_cache": True}
_NO_WINDOW: dict[str, Any] = {"sliding_window": None, "use_sliding_window": False}
_VICUNA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-05}
_CLIP = {"model_type": "clip_vision_model", "projection_dim": 768, "vocab_size": 32000}
# llava-hf/llava-1.5-7b-hf leaves most of the decoder's shape to Llama's defaults.
_LLAVA: dict[str, Any] = {
    **_PROJECTED,
    "architectures": ["LlavaForConditionalGeneration"],
    "image_token_index": 32000,
    "model_type": "llava",
    "pad_token_id": 32001,
    "text_config": {**_VICUNA, "max_position_embeddings": 4096, "vocab_size": 32064},
    "tie_word_embeddings": False,
    "vision_config": {**sizes(1024, 4096, 24, 16), **_CLIP, "image_size": 336, "patch_size": 14},
    "vision_feature_layer": -2,
    "vocab_size": 32064,
}
_LLAVA_NEXT: dict[str, Any] = {
    **{key: value for key, value in _LLAVA.items() if key != "pad_token_id"},
    "architectures": ["LlavaNextForConditionalGeneration"],
    "image_grid_pinpoints": PINPOINTS,
    "model_type": "llava_next",
    "text_config": {**_LLAVA["text_config"], "pad_token_id": 0},
}
_MISTRAL: dict[str, Any] = {
    **_LLAVA["text_config"],
    "architectures": ["MistralForCausalLM"],
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "sliding_window": None,
}
_PATCHES = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_chans": 3}
# Qwen2-VL and Qwen2.5-VL have the decoder's settings at the top.
_QWEN2: dict[str, Any] = {
    **_QWEN_ENDS,
    **_QWEN_MARKS,
    **_SILU,
    **sizes(3584, 18944, 28, 28, 4),
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "image_token_id": 151655,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2_vl",
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "vision_config": {
        **_PATCHES,
        "depth": 32,
        "embed_dim": 1280,
        "mlp_ratio": 4,
        "num_heads": 16,
        "hidden_size": 3584,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 152064,
}
_QWEN25: dict[str, Any] = {
    **_QWEN2,
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "max_position_embeddings": 128000,
    "model_type": "qwen2_5_vl",
    "vision_config": {
        **_PATCHES,
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
    },
}
_QWEN25_72B: dict[str, Any] = {
    **_QWEN25,
    **sizes(8192, 29568, 80, 64, 8),
    "max_window_layers": 80,
    "vision_config": {**_QWEN25["vision_config"], "intermediate_size": 3456, "out_hidden_size": 8192},
}
_QWEN3_TEXT = {**_QWEN_ENDS, **_SILU, "attention_bias": False, "head_dim": 128, "vocab_size": 151936}
_TOWER = {"model_type": "qwen3_vl", "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16}
_PATCHES_OF_16 = {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
_QWEN3: dict[str, Any] = {
    **_QWEN_MARKS,
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 151655,
    "model_type": "qwen3_vl",
    "text_config": {
        **_QWEN3_TEXT,
        **sizes(2048, 6144, 28, 16, 8),
        "dtype": "bfloat16",
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "tie_word_embeddings": True,
    },
    "tie_word_embeddings": True,
    "vision_config": {
        **_TOWER,
        **_PATCHES_OF_16,
        "out_hidden_size": 2048,
        "deepstack_visual_indexes": [5, 11, 17],
        "hidden_act": "gelu_pytorch_tanh",
        "num_position_embeddings": 2304,
    },
}
_LARGE_TOWER = {
    "model_type": "qwen3_vl",
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
}
_COSMOS3: dict[str, Any] = {
    **_QWEN3,
    "architectures": ["Cosmos3ForConditionalGeneration"],
    "model_type": "cosmos3_omni",
    "tie_word_embeddings": False,
    "text_config": {**_QWEN3["text_config"], **sizes(4096, 12288, 36, 32), "tie_word_embeddings": False},
    "vision_config": {**_LARGE_TOWER, "out_hidden_size": 4096},
    "model": {},
}
# OpenGVLab/InternVL3-1B-hf, and InternVL3_5-1B-HF below.
_INTERNVL: dict[str, Any] = {
    **_PROJECTED,
    "architectures": ["InternVLForConditionalGeneration"],
    "downsample_ratio": 0.5,
    "image_seq_length": 256,
    "image_token_id": 151667,
    "model_type": "internvl",
    "text_config": {
        **_QWEN_ENDS,
        **_SILU,
        **_NO_WINDOW,
        **sizes(896, 4864, 24, 14, 2),
        "architectures": ["Qwen2ForCausalLM"],
        "max_position_embeddings": 32768,
        "max_window_layers": 70,
        "model_type": "qwen2",
        "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"},
        "rope_theta": 1000000.0,
        "vocab_size": 151674,
    },
    "transformers_version": "4.52.0.dev0",
    "vision_config": {
        **sizes(1024, 4096, 24, 16),
        "architectures": ["InternVisionModel"],
        "attention_bias": True,
        "dropout": 0.0,
        "hidden_act": "gelu",
        "image_size": [448, 448],
        "layer_norm_eps": 1e-06,
        "model_type": "internvl_vision",
        "norm_type": "layer_norm",
        "num_channels": 3,
        "patch_size": [14, 14],
        "use_absolute_position_embeddings": True,
        "use_mean_pooling": True,
        "use_qk_norm": False,
    },
    "vision_feature_layer": -1,
}
_INTERNVL35: dict[str, Any] = {
    **_INTERNVL,
    "image_token_id": 151671,
    "text_config": {
        **_QWEN3_TEXT,
        **_NO_WINDOW,
        **sizes(1024, 3072, 28, 16, 8),
        "architectures": ["Qwen3ForCausalLM"],
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "rope_scaling": None,
        "rope_theta": 1000000,
    },
}
# google/paligemma-3b-pt-448. That of 224 pixels has no image_size.
_PALIGEMMA: dict[str, Any] = {
    "architectures": ["PaliGemmaForConditionalGeneration"],
    "bos_token_id": 2,
    "eos_token_id": 1,
    "hidden_size": 2048,
    "image_token_index": 257152,
    "model_type": "paligemma",
    "pad_token_id": 0,
    "projection_dim": 2048,
    "text_config": {**sizes(2048, 16384, 18, 8, 1), "model_type": "gemma", "vocab_size": 257216},
    "vision_config": {
        **sizes(1152, 4304, 27, 16),
        "image_size": 448,
        "model_type": "siglip_vision_model",
        "patch_size": 14,
        "projection_dim": 2048,
        "projector_hidden_act": "gelu_fast",
        "vision_use_head": False,
    },
}
_PALIGEMMA_224 = {
    **_PALIGEMMA,
    "vision_config": {key: value for key, value in _PALIGEMMA["vision_config"].items() if key != "image_size"},
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "paligemma-3b-224": _PALIGEMMA_224,
    "paligemma-3b-448": _PALIGEMMA,
    "internvl3-1b": _INTERNVL,
    "internvl3.5-1b": _INTERNVL35,
    "llava-1.5-7b": _LLAVA,
    "llava-next-7b": _LLAVA_NEXT,
    "llava-next-mistral-7b": {**_LLAVA_NEXT, "text_config": _MISTRAL},
    "qwen2-vl-7b": _QWEN2,
    "qwen2.5-vl-7b": _QWEN25,
    "qwen2.5-vl-72b": _QWEN25_72B,
    "qwen3-vl-2b": _QWEN3,
    "cosmos3-nano": _COSMOS3,
}
"""Parsed config.json, by the name of its preset where there is one."""

_CLIP_COLOURS = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
_HALVES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_RESIZED = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
}
_PIXELS_448 = {**_RESIZED, "size": {"height": 448, "width": 448}}
_MERGED = {"temporal_patch_size": 2, "merge_size": 2}
_QWEN25_PROCESSOR: dict[str, Any] = {
    **_MERGED,
    **_CLIP_COLOURS,
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "image_processor_type": "Qwen2VLImageProcessor",
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "internvl3-1b": {
        **_PIXELS_448,
        "crop_to_patches": False,
        "do_convert_rgb": True,
        "image_mean": [0.485, 0.456, 0.406],
        "image_processor_type": "GotOcr2ImageProcessorFast",
        "image_std": [0.229, 0.224, 0.225],
        "max_patches": 12,
        "min_patches": 1,
    },
    "paligemma-3b-448": {
        **_PIXELS_448,
        **_HALVES,
        "do_convert_rgb": None,
        "image_processor_type": "SiglipImageProcessor",
        "image_seq_length": 1024,
    },
    "llava-next-mistral-7b": {
        **_RESIZED,
        **_CLIP_COLOURS,
        "crop_size": {"height": 336, "width": 336},
        "do_center_crop": True,
        "do_convert_rgb": True,
        "image_grid_pinpoints": PINPOINTS,
        "image_processor_type": "LlavaNextImageProcessor",
        "size": {"shortest_edge": 336},
    },
    "qwen2.5-vl-7b": _QWEN25_PROCESSOR,
    "qwen2.5-vl-72b": _QWEN25_PROCESSOR,
    "qwen3-vl-2b": {
        **_MERGED,
        **_HALVES,
        "size": {"longest_edge": 16777216, "shortest_edge": 65536},
        "patch_size": 16,
        "image_processor_type": "Qwen2VLImageProcessorFast",
    },
}
"""Parsed preprocessor_config.json."""


def with_value(document: Any, place: Sequence[str | int], value: Any) -> Any:
    """Return a copy of a JSON `document` that has `value` at `place`."""
    changed = copy.deepcopy(document)
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return changed
