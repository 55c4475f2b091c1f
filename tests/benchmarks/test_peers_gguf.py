"""The files of llama.cpp that the benchmark of peers writes, read again with its own reader."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from peer_engines.checkpoint import make_checkpoint
from peer_engines.gguf import clip_tower, qwen3_tower
from peer_engines.gguf.decoder import write_decoder
from sinkprune.contract.precision import Array
from sinkprune.export.checkpoint.folder import SafetensorsWeights
from support.models.peer_shapes import LLAVA, QWEN3

BF16 = gguf.GGMLQuantizationType.BF16
DECODER = {
    "token_embd": "language_model.embed_tokens",
    "output_norm": "language_model.norm",
    "blk.1.attn_norm": "language_model.layers.1.input_layernorm",
    "blk.2.attn_k": "language_model.layers.2.self_attn.k_proj",
    "blk.1.attn_output": "language_model.layers.1.self_attn.o_proj",
    "blk.3.ffn_norm": "language_model.layers.3.post_attention_layernorm",
}
DECODER |= {f"blk.1.attn_{one}": f"language_model.layers.1.self_attn.{one}_proj" for one in "qv"}
DECODER |= {f"blk.3.ffn_{one}": f"language_model.layers.3.mlp.{one}_proj" for one in ("gate", "up", "down")}
# Block 2 of the tower is where the second of DeepStack's mergers stands.
QWEN3_TOWER = {
    "v.position_embd": "visual.pos_embed",
    "v.blk.4.attn_qkv": "visual.blocks.4.attn.qkv",
    "v.blk.1.attn_out": "visual.blocks.1.attn.proj",
    "v.blk.1.ffn_up": "visual.blocks.1.mlp.linear_fc1",
    "v.blk.1.ffn_down": "visual.blocks.1.mlp.linear_fc2",
    "v.post_ln": "visual.merger.norm",
    "mm.0": "visual.merger.linear_fc1",
    "mm.2": "visual.merger.linear_fc2",
    "v.deepstack.2.norm": "visual.deepstack_merger_list.1.norm",
}
for number in (1, 2):
    QWEN3_TOWER[f"v.blk.4.ln{number}"] = f"visual.blocks.4.norm{number}"
    QWEN3_TOWER[f"v.deepstack.2.fc{number}"] = f"visual.deepstack_merger_list.1.linear_fc{number}"
LLAVA_TOWER = {
    "v.position_embd": "vision_tower.embeddings.position_embedding",
    "v.patch_embd": "vision_tower.embeddings.patch_embedding",
    "v.pre_ln": "vision_tower.pre_layrnorm",
    "v.blk.1.attn_q": "vision_tower.encoder.layers.1.self_attn.q_proj",
    "v.blk.1.attn_out": "vision_tower.encoder.layers.1.self_attn.out_proj",
    "v.blk.1.ffn_down": "vision_tower.encoder.layers.1.mlp.fc2",
    "mm.0": "multi_modal_projector.linear_1",
    "mm.2": "multi_modal_projector.linear_2",
}


class Written:
    """A file as its reader finds it, beside the checkpoint that it was made of."""

    def __init__(self, checkpoint: Path, path: Path, write: Callable[[Path, Path], None]) -> None:
        write(checkpoint, path)
        self.path, self._weights, reader = path, SafetensorsWeights(checkpoint), gguf.GGUFReader(path)
        self.fields = {name: field.contents() for name, field in reader.fields.items()}
        self.tensors = {tensor.name: self._values(tensor) for tensor in reader.tensors}
        self.halved = {tensor.name for tensor in reader.tensors if tensor.tensor_type == BF16}

    def source(self, name: str, shape: tuple[int, ...]) -> Array:
        return self._weights.tensor(name, shape)

    @staticmethod
    def _values(tensor: Any) -> Array:
        if tensor.tensor_type == BF16:
            return tensor.data.view(ml_dtypes.bfloat16).astype(np.float32)
        assert tensor.tensor_type == gguf.GGMLQuantizationType.F32
        return tensor.data

    def check(self, names: dict[str, str]) -> None:
        """Weights, and biases where there are any, have the values of the checkpoint's tensors."""
        for name, source in names.items():
            for kind in ("weight", "bias"):
                found = self.tensors.get(f"{name}.{kind}")
                assert kind == "bias" or found is not None, name
                if found is not None:
                    np.testing.assert_array_equal(found, self.source(f"{source}.{kind}", found.shape), name)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    for name, config in (("llava", LLAVA), ("qwen3", QWEN3)):
        make_checkpoint(folder / name, config)
        for shard in (folder / name).glob("*.safetensors"):
            save_file(told_apart(load_file(shard)), shard, metadata={"format": "pt"})
    return {name: folder / name for name in ("llava", "qwen3")}


def told_apart(tensors: dict[str, Array]) -> dict[str, Array]:
    """The tensors of a shard with other norms than 1 and other biases than 0, each its own."""
    rng = np.random.default_rng(3)
    vectors = {name: rng.normal(size=tensor.shape) for name, tensor in tensors.items() if tensor.ndim == 1}
    return {**tensors, **{name: vector.astype(ml_dtypes.bfloat16) for name, vector in vectors.items()}}


def numbered(names: set[str]) -> set[str]:
    """Names without the numbers of layers."""
    return {re.sub(r"\.\d+\.", ".N.", name) for name in names}


def test_qwen3s_decoder_has_its_norms_sections_and_deepstack(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    decoder = Written(checkpoints["qwen3"], tmp_path / "decoder", write_decoder)
    norms = {f"blk.1.attn_{one}_norm": f"language_model.layers.1.self_attn.{one}_norm" for one in "qk"}
    decoder.check({**DECODER, **norms})
    expected = {f"{name}.weight" for name in {**DECODER, **norms}}
    assert numbered(set(decoder.tensors)) == numbered(expected)
    assert decoder.fields["general.architecture"] == "qwen3vl"
    assert decoder.fields["qwen3vl.rope.dimension_sections"] == [6, 5, 5, 0]
    assert decoder.fields["qwen3vl.n_deepstack_layers"] == 3
    assert decoder.fields["qwen3vl.attention.key_length"] == 32
    assert decoder.fields["qwen3vl.rope.freq_base"] == 1e4
    assert len(decoder.fields["tokenizer.ggml.tokens"]) == 384


def test_llavas_queries_and_keys_are_turned_as_neighbours(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    decoder = Written(checkpoints["llava"], tmp_path / "decoder", write_decoder)
    turned = {"blk.1.attn_q": 4, "blk.2.attn_k": 2}
    decoder.check({name: source for name, source in DECODER.items() if name not in turned})
    for name, heads in turned.items():
        found = decoder.tensors[f"{name}.weight"]
        halves = decoder.source(f"{DECODER[name]}.weight", found.shape).reshape(heads, 2, 8, 64)
        np.testing.assert_array_equal(found.reshape(heads, 8, 2, 64)[:, :, 0], halves[:, 0])
        np.testing.assert_array_equal(found.reshape(heads, 8, 2, 64)[:, :, 1], halves[:, 1])
    assert decoder.fields["general.architecture"] == "llama"


def test_qwen3s_tower_has_a_patch_embedding_for_each_frame_and_mergers_at_their_blocks(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    tower = Written(checkpoints["qwen3"], tmp_path / "tower", qwen3_tower.write_tower)
    tower.check(QWEN3_TOWER)
    whole = tower.source("visual.patch_embed.proj.weight", (48, 3, 2, 16, 16))
    np.testing.assert_array_equal(tower.tensors["v.patch_embd.weight"], whole[:, :, 0])
    np.testing.assert_array_equal(tower.tensors["v.patch_embd.weight.1"], whole[:, :, 1])
    assert {int(name.split(".")[2]) for name in tower.tensors if "deepstack" in name} == {0, 2, 3}
    # llama.cpp stretches the table of positions in fp32 alone.
    assert "v.position_embd.weight" not in tower.halved and "v.blk.4.attn_qkv.weight" in tower.halved
    # 12 tensors in a block, 6 in a merger, and both weights, the bias and the table in front of them
    assert len(tower.tensors) == 5 * 12 + 4 * 6 + 4
    assert tower.fields["clip.projector_type"] == "qwen3vl_merger"
    assert tower.fields["clip.vision.image_size"] == 80
    assert qwen3_tower.visual_tokens(checkpoints["qwen3"]) == (4, 980)


def test_llavas_tower_ends_at_the_layer_whose_states_are_taken(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    tower = Written(checkpoints["llava"], tmp_path / "tower", clip_tower.write_tower)
    tower.check(LLAVA_TOWER)
    assert {int(name.split(".")[2]) for name in tower.tensors if name.startswith("v.blk.")} == {0, 1}
    assert tower.fields["clip.vision.feature_layer"] == [2]
    assert clip_tower.visual_tokens(checkpoints["llava"]) == (576, 576)
