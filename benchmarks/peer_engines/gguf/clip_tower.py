"""LLaVA's CLIP tower and projector as llama.cpp's file, with the tensor names of its legacy converter."""

from __future__ import annotations

from pathlib import Path

from peer_engines.gguf.files import MOSTLY_BF16, GgufFile
from sinkprune.export.checkpoint.folder import read_json

_BLOCK = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}


def write_tower(checkpoint: Path, path: Path) -> None:
    """Write the CLIP tower up to its feature layer, and the projector; matrices in bf16."""
    config = read_json(checkpoint, "config.json")
    processor = read_json(checkpoint, "preprocessor_config.json")
    vision, width = config["vision_config"], config["text_config"]["hidden_size"]
    layers, own, inner = vision["num_hidden_layers"], vision["hidden_size"], vision["intermediate_size"]
    taken = layers + 1 + config["vision_feature_layer"]
    file = GgufFile(path, "clip", checkpoint)
    writer = file.writer
    writer.add_file_type(MOSTLY_BF16)
    for name, flag in {"has_vision_encoder": True, "has_llava_projector": True, "use_gelu": False}.items():
        writer.add_bool(f"clip.{name}", flag)
    writer.add_string("clip.projector_type", "mlp")
    numbers = {"image_size": vision["image_size"], "patch_size": vision["patch_size"], "embedding_length": own}
    numbers |= {"feed_forward_length": inner, "projection_dim": vision["projection_dim"], "block_count": taken}
    numbers |= {"attention.head_count": vision["num_attention_heads"]}
    for name, number in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", vision.get("layer_norm_eps", 1e-5))
    writer.add_array("clip.vision.feature_layer", [taken])
    writer.add_array("clip.vision.image_mean", processor["image_mean"])
    writer.add_array("clip.vision.image_std", processor["image_std"])
    side, patch = vision["image_size"], vision["patch_size"]
    tower, rows = "vision_tower.", (side // patch) ** 2 + 1
    file.add("v.class_embd", f"{tower}embeddings.class_embedding", (own,))
    file.add("v.patch_embd.weight", f"{tower}embeddings.patch_embedding.weight", (own, 3, patch, patch))
    file.add("v.position_embd.weight", f"{tower}embeddings.position_embedding.weight", (rows, own))
    for kind in ("weight", "bias"):
        file.add(f"v.pre_ln.{kind}", f"{tower}pre_layrnorm.{kind}", (own,))
        for number, name in ((0, "linear_1"), (2, "linear_2")):
            matrix = (width, width if number else own) if kind == "weight" else (width,)
            file.add(f"mm.{number}.{kind}", f"multi_modal_projector.{name}.{kind}", matrix)
    for layer in range(taken):
        for source, name in _BLOCK.items():
            outputs = inner if name == "ffn_up" else own
            inputs = inner if name == "ffn_down" else own
            place = f"{tower}encoder.layers.{layer}.{source}"
            matrix = (own,) if name.startswith("ln") else (outputs, inputs)
            file.add(f"v.blk.{layer}.{name}.weight", f"{place}.weight", matrix)
            file.add(f"v.blk.{layer}.{name}.bias", f"{place}.bias", (outputs,))
    file.write()


def visual_tokens(checkpoint: Path) -> tuple[int, int]:
    """Return the fewest and the most visual tokens of a picture: all pictures are resized to one size."""
    vision = read_json(checkpoint, "config.json")["vision_config"]
    count = (vision["image_size"] // vision["patch_size"]) ** 2
    return count, count
