"""Small configurations for the benchmark of peers, in the words of config.json."""

from __future__ import annotations

from typing import Any

LLAVA: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token_index": 380,
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "projector_hidden_act": "gelu",
    "tie_word_embeddings": False,
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": 336,
        "patch_size": 14,
        "projection_dim": 64,
    },
    "text_config": {
        "model_type": "llama",
        "vocab_size": 384,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
QWEN: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "image_token_id": 375,
    "video_token_id": 376,
    "vision_start_token_id": 373,
    "vision_end_token_id": 374,
    "tie_word_embeddings": True,
    "vision_config": {
        "model_type": "qwen2_5_vl_vision",
        "depth": 3,
        "num_heads": 4,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "out_hidden_size": 64,
        "window_size": 112,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    },
    "text_config": {
        "model_type": "qwen2_5_vl_text",
        "vocab_size": 384,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": 371,
        "eos_token_id": 372,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    },
}
