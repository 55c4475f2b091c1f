"""Qwen3-VL's tower and mergers as llama.cpp's file; DeepStack's mergers have the number of the block before them."""

from __future__ import annotations

from functools import partial
from math import isqrt
from pathlib import Path

from peer_engines.gguf.files import MOSTLY_BF16, GgufFile
from sinkprune.contract.precision import Array
from sinkprune.export.checkpoint.folder import read_json
from sinkprune.export.models.qwen_vision import EPSILON

_BLOCK = {
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
}


def write_tower(checkpoint: Path, path: Path) -> None:
    """Write the tower, its merger, and those of DeepStack; matrices in bf16, the table of positions in fp32."""
    vision = read_json(checkpoint, "config.json")["vision_config"]
    processor = read_json(checkpoint, "preprocessor_config.json")
    own, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    merge, frames, width = vision["spatial_merge_size"], vision["temporal_patch_size"], vision["out_hidden_size"]
    joined = own * merge**2
    file = GgufFile(path, "clip", checkpoint)
    writer = file.writer
    writer.add_file_type(MOSTLY_BF16)
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type("qwen3vl_merger")
    writer.add_vision_use_gelu(True)
    # The size that the table of positions is for; pictures may have any.
    writer.add_vision_image_size(isqrt(vision["num_position_embeddings"]) * patch)
    writer.add_vision_patch_size(patch)
    writer.add_vision_spatial_merge_size(merge)
    writer.add_vision_embedding_length(own)
    writer.add_vision_feed_forward_length(inner)
    writer.add_vision_projection_dim(width)
    writer.add_vision_block_count(vision["depth"])
    writer.add_vision_head_count(vision["num_heads"])
    writer.add_vision_attention_layernorm_eps(EPSILON)
    writer.add_vision_image_mean(processor["image_mean"])
    writer.add_vision_image_std(processor["image_std"])

    def add(name: str, source: str, outputs: int, *inputs: int) -> None:
        """Add a layer's weight and bias; a norm has no inputs."""
        file.add(f"{name}.weight", f"visual.{source}.weight", (outputs, *inputs))
        file.add(f"{name}.bias", f"visual.{source}.bias", (outputs,))

    def add_merger(names: tuple[str, str, str], source: str, normed: int) -> None:
        norm, first, second = names
        add(norm, f"{source}.norm", normed)
        add(first, f"{source}.linear_fc1", joined, joined)
        add(second, f"{source}.linear_fc2", width, joined)

    for number in range(frames):
        file.add(
            f"v.patch_embd.weight.{number}" if number else "v.patch_embd.weight",
            "visual.patch_embed.proj.weight",
            (own, 3, patch, patch),
            source_shape=(own, 3, frames, patch, patch),
            change=partial(_frame, number=number),
        )
    file.add("v.patch_embd.bias", "visual.patch_embed.proj.bias", (own,))
    # llama.cpp interpolates the table in fp32 only.
    table = (vision["num_position_embeddings"], own)
    file.add("v.position_embd.weight", "visual.pos_embed.weight", table, fp32=True)
    shapes = {
        "ln1": (own,),
        "ln2": (own,),
        "attn_qkv": (3 * own, own),
        "attn_out": (own, own),
        "ffn_up": (inner, own),
        "ffn_down": (own, inner),
    }
    for block in range(vision["depth"]):
        for source, name in _BLOCK.items():
            add(f"v.blk.{block}.{name}", f"blocks.{block}.{source}", *shapes[name])
    for number, block in enumerate(vision["deepstack_visual_indexes"]):
        place = f"v.deepstack.{block}"
        names = (f"{place}.norm", f"{place}.fc1", f"{place}.fc2")
        add_merger(names, f"deepstack_merger_list.{number}", joined)
    add_merger(("v.post_ln", "mm.0", "mm.2"), "merger", own)
    file.write()


def _frame(embedding: Array, number: int) -> Array:
    """Return the patch embedding of one frame of a pair; llama.cpp stores each by itself."""
    return embedding[:, :, number]


def visual_tokens(checkpoint: Path) -> tuple[int, int]:
    """Return the fewest and the most visual tokens of a picture, by the pixels that the processor allows."""
    processor = read_json(checkpoint, "preprocessor_config.json")
    each = (processor["patch_size"] * processor["merge_size"]) ** 2
    return -(-processor["min_pixels"] // each), processor["max_pixels"] // each
