"""Small configurations for the benchmark of peers: presets with fewer and narrower layers."""

from __future__ import annotations

from typing import Any

from sinkprune.export.checkpoint.presets import PRESETS

_TEXT: dict[str, Any] = {
    "vocab_size": 384,
    "max_position_embeddings": 1024,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_SQUARE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "projection_dim": 64,
}
_MARKS = {"image_token_id": 375, "video_token_id": 376, "vision_start_token_id": 373, "vision_end_token_id": 374}


def _small(preset: str, vision: dict[str, Any], text: dict[str, Any], **top: Any) -> dict[str, Any]:
    config = PRESETS[preset]
    return {
        **config,
        "vision_config": {**config["vision_config"], **vision},
        "text_config": {**config["text_config"], **_TEXT, **text},
        **top,
    }


def _qwen(preset: str, vision: dict[str, Any], sections: list[int], **text: Any) -> dict[str, Any]:
    rope = {**PRESETS[preset]["text_config"]["rope_parameters"], "rope_theta": 1e4, "mrope_section": sections}
    own = {"bos_token_id": 371, "eos_token_id": 372, "rope_parameters": rope, **text}
    return _small(preset, {"num_heads": 4, "out_hidden_size": 64, **vision}, own, tie_word_embeddings=True, **_MARKS)


LLAVA = _small("llava-1.1b", _SQUARE, {}, image_token_index=380)
QWEN = _qwen(
    "qwen2.5-vl-3b",
    {"depth": 3, "hidden_size": 64, "intermediate_size": 96, "fullatt_block_indexes": [1]},
    [2, 3, 3],
)
# A table of 5 x 5, which a picture of 96 pixels does not fit
_TABLE = {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2, 3]}
QWEN3 = _qwen(
    "qwen3-vl-2b",
    {"depth": 5, "hidden_size": 48, "intermediate_size": 96, **_TABLE},
    [6, 5, 5],
    head_dim=32,
)
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 4}
_PI0, _SIZES = PRESETS["pi0"], {"max_position_embeddings": 1024, **_HEADS}
_VLM = _PI0["vlm_config"]
PI0: dict[str, Any] = {
    **_PI0,
    "vlm_config": {
        **_VLM,
        "projection_dim": 64,
        "image_token_id": 384,
        "text_config": {
            **_VLM["text_config"],
            **_SIZES,
            "hidden_size": 64,
            "intermediate_size": 160,
            "vocab_size": 384,
        },
        "vision_config": {**_VLM["vision_config"], **_SQUARE, "image_size": 56},
    },
    "dit_config": {**_PI0["dit_config"], **_SIZES, "hidden_size": 48, "intermediate_size": 96},
    "chunk_size": 6,
    "max_state_dim": 5,
    "max_action_dim": 5,
}
_OFT = PRESETS["openvla-7b-oft"]
_TOWER = {"embed_dim": 64, "depth": 3, "num_heads": 4, "mlp_ratio": 2.0}
OFT: dict[str, Any] = {
    **_OFT,
    "image_sizes": [56, 56],
    "timm_model_args": [{**_TOWER, "reg_tokens": 4}, {**_TOWER, "reg_tokens": 0}],
    # Prompts end with a token that only Llama's vocabulary has.
    "text_config": {**_TEXT, **_OFT["text_config"]},
}
