"""LLaVA checkpoints as llama.cpp's two files: the decoder, and the tower with its projector.

llama.cpp's own converter knows neither the small tokenizer nor LLaVA's tower in Hugging Face format. What its legacy
converter for towers names the tensors is kept. Tokens are bare numbers here: the ids are made outside.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from sinkprune.contract.precision import Array
from sinkprune.export.checkpoint import SafetensorsWeights, read_json

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
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


class _File:
    """A GGUF file whose tensors are read, turned and written one at a time."""

    def __init__(self, path: Path, architecture: str) -> None:
        import gguf

        self.writer = gguf.GGUFWriter(path, architecture)
        self._types = gguf.GGMLQuantizationType
        self._tensors: list[tuple[str, tuple[int, ...], Any, Callable[[], Array]]] = []

    def add(self, name: str, shape: tuple[int, ...], read: Callable[[], Array]) -> None:
        """A tensor; matrices are kept in bf16, all else in fp32."""
        kind = self._types.BF16 if len(shape) == 2 else self._types.F32
        self._tensors.append((name, shape, kind, read))

    def write(self) -> None:
        """Write it all."""
        dtypes = {self._types.BF16: np.dtype(ml_dtypes.bfloat16), self._types.F32: np.dtype(np.float32)}
        for name, shape, kind, _ in self._tensors:
            size = int(np.prod(shape)) * dtypes[kind].itemsize
            self.writer.add_tensor_info(name, shape, np.dtype(np.float32), size, kind)
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_ti_data_to_file()
        for _, shape, kind, read in self._tensors:
            self.writer.write_tensor_data(read().reshape(shape).astype(dtypes[kind]).view(np.uint8))
        self.writer.close()


def write_decoder(checkpoint: Path, path: Path) -> None:
    """The Llama decoder of a LLaVA checkpoint, in bf16."""
    text = read_json(checkpoint, "config.json")["text_config"]
    width, heads = text["hidden_size"], text["num_attention_heads"]
    kv_heads, vocabulary = text["num_key_value_heads"], text["vocab_size"]
    head = width // heads
    file = _File(path, "llama")
    writer = file.writer
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(width)
    writer.add_block_count(text["num_hidden_layers"])
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(text.get("rope_theta", 1e4))
    writer.add_vocab_size(vocabulary)
    writer.add_file_type(32)  # mostly bf16
    _add_vocabulary(writer, vocabulary)
    shapes = {
        "attn_q": (width, width),
        "attn_k": (kv_heads * head, width),
        "attn_v": (kv_heads * head, width),
        "attn_output": (width, width),
        "ffn_gate": (text["intermediate_size"], width),
        "ffn_up": (text["intermediate_size"], width),
        "ffn_down": (width, text["intermediate_size"]),
        "attn_norm": (width,),
        "ffn_norm": (width,),
    }
    turned = {"attn_q": heads, "attn_k": kv_heads}
    with closing(SafetensorsWeights(checkpoint)) as weights:

        def add(name: str, source: str, shape: tuple[int, ...], groups: int | None = None) -> None:
            def read() -> Array:
                array = weights.tensor(source, shape)
                return array if groups is None else _interleaved(array, groups)

            file.add(name, shape, read)

        add("token_embd.weight", "language_model.embed_tokens.weight", (vocabulary, width))
        for layer in range(text["num_hidden_layers"]):
            for source, name in _LAYER.items():
                place = f"language_model.layers.{layer}.{source}.weight"
                add(f"blk.{layer}.{name}.weight", place, shapes[name], turned.get(name))
        add("output_norm.weight", "language_model.norm.weight", (width,))
        add("output.weight", "lm_head.weight", (vocabulary, width))
        file.write()


def write_tower(checkpoint: Path, path: Path) -> None:
    """The CLIP tower up to the layer whose states are taken, and the projector; matrices in bf16."""
    config = read_json(checkpoint, "config.json")
    processor = read_json(checkpoint, "preprocessor_config.json")
    vision, width = config["vision_config"], config["text_config"]["hidden_size"]
    layers, own, inner = vision["num_hidden_layers"], vision["hidden_size"], vision["intermediate_size"]
    taken = layers + 1 + config["vision_feature_layer"]
    file = _File(path, "clip")
    writer = file.writer
    writer.add_file_type(32)
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
    with closing(SafetensorsWeights(checkpoint)) as weights:

        def add(name: str, source: str, *shape: int) -> None:
            file.add(name, shape, lambda: weights.tensor(source, shape))

        tower = "vision_tower."
        add("v.class_embd", f"{tower}embeddings.class_embedding", own)
        add("v.patch_embd.weight", f"{tower}embeddings.patch_embedding.weight", own, 3, patch, patch)
        rows = (side // patch) ** 2 + 1
        add("v.position_embd.weight", f"{tower}embeddings.position_embedding.weight", rows, own)
        for kind in ("weight", "bias"):
            add(f"v.pre_ln.{kind}", f"{tower}pre_layrnorm.{kind}", own)
            for number, name in ((0, "linear_1"), (2, "linear_2")):
                matrix = (width, width if number else own) if kind == "weight" else (width,)
                add(f"mm.{number}.{kind}", f"multi_modal_projector.{name}.{kind}", *matrix)
        for layer in range(taken):
            for source, name in _BLOCK.items():
                outputs = inner if name == "ffn_up" else own
                inputs = inner if name == "ffn_down" else own
                place = f"{tower}encoder.layers.{layer}.{source}"
                matrix = (own,) if name.startswith("ln") else (outputs, inputs)
                add(f"v.blk.{layer}.{name}.weight", f"{place}.weight", *matrix)
                add(f"v.blk.{layer}.{name}.bias", f"{place}.bias", outputs)
        file.write()


def _add_vocabulary(writer: Any, size: int) -> None:
    """Control tokens, bytes, and numbers: what is fed are ids, and answers are never read."""
    import gguf

    kinds = gguf.TokenType
    tokens = ["<unk>", "<s>", "</s>", *_BYTES]
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * len(_BYTES)]
    left = size - len(tokens)
    tokens += [f"token{number}" for number in range(left)]
    types += [kinds.NORMAL] * left
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * size)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def _interleaved(array: Array, heads: int) -> Array:
    """Rows of queries or keys as llama.cpp rotates them: neighbours, not halves."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def matrix_bytes(path: Path) -> int:
    """Bytes of a decoder's file that a token behind the first reads: all but the embedding table."""
    import gguf

    tensors = gguf.GGUFReader(path).tensors
    return sum(tensor.n_bytes for tensor in tensors if not re.match(r"token_embd\.", tensor.name))


def quantise(source: Path, target: Path, kind: int, threads: int) -> int:
    """llama.cpp's own rounding of a file, to a number of its `llama_ftype`; returns 0 if all went well."""
    import llama_cpp

    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, settings.nthread = kind, threads
    code: int = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), settings)
    return code
