"""Small configurations: sizes of layers, and presets with fewer and narrower ones for the benchmark of peers."""

from __future__ import annotations

from typing import Any

from sinkprune.export.checkpoint.presets import PRESETS


def sizes(width: int, inner: int, layers: int, heads: int, kv_heads: int | None = None) -> dict[str, Any]:
    """Return the sizes of a transformer in the words of config.json."""
    own = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    return {**own, "num_attention_heads": heads, **({} if kv_heads is None else {"num_key_value_heads": kv_heads})}


def siglip_config(image_size: int, width: int, own: dict[str, Any]) -> dict[str, Any]:
    """Return the tower of a small PaliGemma of its `own` sizes, for a decoder of this `width`."""
    facts = {"model_type": "siglip_vision_model", "patch_size": 14, "vision_use_head": False}
    return {**facts, **own, "image_size": image_size, "projection_dim": width}


_TEXT: dict[str, Any] = {"vocab_size": 384, "max_position_embeddings": 1024, **sizes(64, 160, 4, 4, 2)}
_SQUARE: dict[str, Any] = {**sizes(64, 128, 3, 4), "projection_dim": 64}
MARKS = {"image_token_id": 375, "video_token_id": 376, "vision_start_token_id": 373, "vision_end_token_id": 374}


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
    return _small(preset, {"num_heads": 4, "out_hidden_size": 64, **vision}, own, tie_word_embeddings=True, **MARKS)


LLAVA = _small("llava-1.1b", _SQUARE, {}, image_token_index=380)
_WINDOWS = {"depth": 3, "hidden_size": 64, "intermediate_size": 96, "fullatt_block_indexes": [1]}
QWEN = _qwen("qwen2.5-vl-3b", _WINDOWS, [2, 3, 3])
# A table of 5 x 5, which a picture of 96 pixels does not fit
_TABLE = {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2, 3]}
_DEEP = {"depth": 5, "hidden_size": 48, "intermediate_size": 96, **_TABLE}
QWEN3 = _qwen("qwen3-vl-2b", _DEEP, [6, 5, 5], head_dim=32)
_PI0, _HEADS = PRESETS["pi0"], {"max_position_embeddings": 1024, "head_dim": 32}
_VLM = _PI0["vlm_config"]
PI0: dict[str, Any] = {
    **_PI0,
    "vlm_config": {
        **_VLM,
        "projection_dim": 64,
        "image_token_id": 384,
        "text_config": {**_VLM["text_config"], **_HEADS, **sizes(64, 160, 4, 2, 1), "vocab_size": 384},
        "vision_config": {**_VLM["vision_config"], **_SQUARE, "image_size": 56},
    },
    "dit_config": {**_PI0["dit_config"], **_HEADS, **sizes(48, 96, 4, 2, 1)},
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
