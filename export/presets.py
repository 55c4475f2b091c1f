"""Model shapes by name, for `--random-weights`: sizing and latency work before any download."""

from __future__ import annotations

from typing import Any

_CLIP_L_336 = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "projection_dim": 768,
}


def _llava(**text: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": 32000,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "tie_word_embeddings": False,
        "vision_config": _CLIP_L_336,
        "text_config": {
            "model_type": "llama",
            "vocab_size": 32064,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            **text,
        },
    }


PRESETS: dict[str, dict[str, Any]] = {
    "llava-1.5-7b": _llava(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
    ),
    "llava-1.5-13b": _llava(
        hidden_size=5120,
        intermediate_size=13824,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=40,
    ),
    "llava-1.1b": _llava(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
    ),
}
"""Configurations in the words of config.json. `llava-1.1b` is CLIP-L/336 with a TinyLlama-shaped decoder."""
