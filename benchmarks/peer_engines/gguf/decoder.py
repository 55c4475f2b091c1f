"""The decoder of a checkpoint as llama.cpp's file: LLaVA's Llama, and Qwen3-VL's Qwen3."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from peer_engines.gguf.files import MOSTLY_BF16, GgufFile, add_vocabulary
from sinkprune.contract.precision import Array
from sinkprune.export.checkpoint.folder import read_json


@dataclass(frozen=True)
class _Kind:
    """llama.cpp's name of a decoder, and its format."""

    architecture: str
    neighbours: bool
    """Whether rotary embeddings rotate pairs of neighbouring rows; transformers rotates pairs of halves."""
    head_norms: bool


_KINDS = {
    "llava": _Kind("llama", neighbours=True, head_norms=False),
    "qwen3_vl": _Kind("qwen3vl", neighbours=False, head_norms=True),
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}


def write_decoder(checkpoint: Path, path: Path) -> None:
    """Write the decoder of a LLaVA or Qwen3-VL checkpoint, in bf16."""
    config = read_json(checkpoint, "config.json")
    text, kind = config["text_config"], _KINDS[config["model_type"]]
    width, inner, vocabulary = text["hidden_size"], text["intermediate_size"], text["vocab_size"]
    heads, kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
    head = text.get("head_dim") or width // heads
    file = GgufFile(path, kind.architecture, checkpoint)
    _add_settings(file.writer, config, head)
    shapes = {
        "attn_q": (heads * head, width),
        "attn_k": (kv_heads * head, width),
        "attn_v": (kv_heads * head, width),
        "attn_output": (width, heads * head),
        "ffn_gate": (inner, width),
        "ffn_up": (inner, width),
        "ffn_down": (width, inner),
        "attn_norm": (width,),
        "ffn_norm": (width,),
        "attn_q_norm": (head,),
        "attn_k_norm": (head,),
    }
    rotated = {"attn_q": heads, "attn_k": kv_heads} if kind.neighbours else {}
    file.add("token_embd.weight", "language_model.embed_tokens.weight", (vocabulary, width))
    for layer in range(text["num_hidden_layers"]):
        for source, name in {**_LAYER, **(_HEAD_NORMS if kind.head_norms else {})}.items():
            place, target = f"language_model.layers.{layer}.{source}.weight", f"blk.{layer}.{name}.weight"
            change = {"change": partial(_interleaved, heads=rotated[name])} if name in rotated else {}
            file.add(target, place, shapes[name], **change)
    file.add("output_norm.weight", "language_model.norm.weight", (width,))
    if not config["tie_word_embeddings"]:
        file.add("output.weight", "lm_head.weight", (vocabulary, width))
    file.write()


def _add_settings(writer: Any, config: dict[str, Any], head: int) -> None:
    text = config["text_config"]
    rope = text.get("rope_parameters") or text
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_block_count(text["num_hidden_layers"])
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(text["num_attention_heads"])
    writer.add_head_count_kv(text["num_key_value_heads"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(rope.get("rope_theta", 1e4))
    if "mrope_section" in rope:
        # The format has four axes, pictures have three.
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if "deepstack_visual_indexes" in config["vision_config"]:
        writer.add_num_deepstack_layers(len(config["vision_config"]["deepstack_visual_indexes"]))
    writer.add_vocab_size(text["vocab_size"])
    writer.add_file_type(MOSTLY_BF16)
    add_vocabulary(writer, text["vocab_size"])


def _interleaved(array: Array, heads: int) -> Array:
    """Return the rows of queries or keys in llama.cpp's order: pairs as neighbours, not as halves."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)
