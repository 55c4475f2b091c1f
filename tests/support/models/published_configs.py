"""The config.json and the processor settings of published checkpoints, as the hub has them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
# llava-hf/llava-1.5-7b-hf leaves most of the decoder's shape to Llama's defaults.
_LLAVA: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "ignore_index": -100,
    "image_token_index": 32000,
    "model_type": "llava",
    "pad_token_id": 32001,
    "projector_hidden_act": "gelu",
    "text_config": {
        "_name_or_path": "lmsys/vicuna-7b-v1.5",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float16",
        "vocab_size": 32064,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "vocab_size": 32064,
}
_LLAVA_NEXT: dict[str, Any] = {
    **{key: value for key, value in _LLAVA.items() if key != "pad_token_id"},
    "architectures": ["LlavaNextForConditionalGeneration"],
    "image_grid_pinpoints": PINPOINTS,
    "model_type": "llava_next",
    "text_config": {**_LLAVA["text_config"], "pad_token_id": 0},
    "use_image_newline_parameter": True,
}
_MISTRAL: dict[str, Any] = {
    "_name_or_path": "mistralai/Mistral-7B-Instruct-v0.2",
    "architectures": ["MistralForCausalLM"],
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "vocab_size": 32064,
}
# Qwen2-VL and Qwen2.5-VL have the decoder's settings at the top.
_QWEN2: dict[str, Any] = {
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
_QWEN25: dict[str, Any] = {
    **_QWEN2,
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "max_position_embeddings": 128000,
    "model_type": "qwen2_5_vl",
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
}
_QWEN25_72B: dict[str, Any] = {
    **_QWEN25,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "max_window_layers": 80,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "vision_config": {**_QWEN25["vision_config"], "intermediate_size": 3456, "out_hidden_size": 8192},
}
_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 151655,
    "model_type": "qwen3_vl",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "dtype": "bfloat16",
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": 151936,
    },
    "tie_word_embeddings": True,
    "video_token_id": 151656,
    "vision_config": {
        "deepstack_visual_indexes": [5, 11, 17],
        "depth": 24,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1024,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 4096,
        "model_type": "qwen3_vl",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2048,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
}
_LARGE = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
_TOWER = {"model_type": "qwen3_vl", "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}
_COSMOS3: dict[str, Any] = {
    **_QWEN3,
    "architectures": ["Cosmos3ForConditionalGeneration"],
    "model_type": "cosmos3_omni",
    "tie_word_embeddings": False,
    "text_config": {**_QWEN3["text_config"], **_LARGE, "tie_word_embeddings": False},
    "vision_config": {**_TOWER, "out_hidden_size": 4096},
    "model": {},
}
PUBLISHED: dict[str, dict[str, Any]] = {
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

_CLIP_COLOURS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_QWEN25_PROCESSOR: dict[str, Any] = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    **_CLIP_COLOURS,
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "llava-next-mistral-7b": {
        "aspect_ratio_setting": "anyres",
        "crop_size": {"height": 336, "width": 336},
        "do_center_crop": True,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_grid_pinpoints": PINPOINTS,
        **_CLIP_COLOURS,
        "image_processor_type": "LlavaNextImageProcessor",
        "processor_class": "LlavaNextProcessor",
        "resample": 3,
        "rescale_factor": 0.00392156862745098,
        "size": {"shortest_edge": 336},
    },
    "qwen2.5-vl-7b": _QWEN25_PROCESSOR,
    "qwen2.5-vl-72b": _QWEN25_PROCESSOR,
    "qwen3-vl-2b": {
        "size": {"longest_edge": 16777216, "shortest_edge": 65536},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
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
