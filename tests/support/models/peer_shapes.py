"""Small configurations for the benchmark of peers, in the words of config.json."""

from __future__ import annotations

from typing import Any

_TEXT: dict[str, Any] = {
    "vocab_size": 384,
    "max_position_embeddings": 1024,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_MARKS: dict[str, Any] = {
    "image_token_id": 375,
    "video_token_id": 376,
    "vision_start_token_id": 373,
    "vision_end_token_id": 374,
}
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
        **_TEXT,
        "rms_norm_eps": 1e-5,
    },
}
QWEN: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    **_MARKS,
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
        **_TEXT,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 371,
        "eos_token_id": 372,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    },
}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    **_MARKS,
    "tie_word_embeddings": True,
    "vision_config": {
        "model_type": "qwen3_vl_vision",
        "depth": 5,
        "num_heads": 4,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "hidden_size": 48,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 96,
        "out_hidden_size": 64,
        # A table of 5 x 5, which a picture of 96 pixels does not fit
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0, 2, 3],
    },
    "text_config": {
        "model_type": "qwen3_vl_text",
        **_TEXT,
        "rms_norm_eps": 1e-6,
        "head_dim": 32,
        "bos_token_id": 371,
        "eos_token_id": 372,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    },
}
_GEMMA: dict[str, Any] = {
    "model_type": "gemma",
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
}
PI0: dict[str, Any] = {
    "architectures": ["PI0ForConditionalGeneration"],
    "model_type": "pi0",
    "vlm_config": {
        "model_type": "paligemma",
        "projection_dim": 64,
        "image_token_id": 384,
        "text_config": {**_GEMMA, "hidden_size": 64, "intermediate_size": 160, "vocab_size": 384},
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 56,
            "patch_size": 14,
            "projection_dim": 64,
            "vision_use_head": False,
        },
    },
    "dit_config": {**_GEMMA, "hidden_size": 48, "intermediate_size": 96},
    "chunk_size": 6,
    "max_state_dim": 5,
    "max_action_dim": 5,
    "num_inference_steps": 10,
}
