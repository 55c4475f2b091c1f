"""The files of llama.cpp that the benchmark of peers writes, read again with its own reader."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
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
LAYERS = 8
"""More than there are."""
# What gguf's table of names lacks. Block 2 of the tower is where the second of DeepStack's mergers stands.
HEAD = {"output": "lm_head"}
PROJECTOR = {"mm.0": "multi_modal_projector.linear_1", "mm.2": "multi_modal_projector.linear_2"}
MERGERS = {"v.post_ln": "visual.merger.norm", "mm.0": "visual.merger.linear_fc1", "mm.2": "visual.merger.linear_fc2"}
for number, block in enumerate((0, 2, 3)):
    for name, layer in (("norm", "norm"), ("fc1", "linear_fc1"), ("fc2", "linear_fc2")):
        MERGERS[f"v.deepstack.{block}.{name}"] = f"visual.deepstack_merger_list.{number}.{layer}"


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

    def check(self, part: str, others: Mapping[str, str], changed: Collection[str] = ()) -> set[str]:
        """That tensors have the values of those of `part` of the checkpoint which gguf's own table names so.

        `others` are names that the table lacks, and `changed` those with other values. Returns the tensors of the
        checkpoint that are not in the file, by the names that they would have.
        """
        decoder = part.startswith("language_model")
        table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3VL if decoder else gguf.MODEL_ARCH.MMPROJ, LAYERS)
        known = {"language_model.": "model.", "vision_tower.": "vision_tower.vision_model."}.get(part, part)
        kinds = (".weight", ".bias")
        own = [name for name in self._weights.owners if name.startswith(part)]
        sources = {table.get_name(name.replace(part, known), kinds): name for name in own}
        sources |= {f"{name}{kind}": f"{source}{kind}" for name, source in others.items() for kind in kinds}
        for name in self.tensors.keys() - changed:
            found = self.tensors[name]
            np.testing.assert_array_equal(found, self.source(sources[name], found.shape), name)
        return {name for name, source in sources.items() if name and source in own} - {*self.tensors}


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


def test_qwen3s_decoder_has_its_norms_sections_and_deepstack(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    decoder = Written(checkpoints["qwen3"], tmp_path / "decoder", write_decoder)
    assert decoder.check("language_model.", {}) == set()
    assert decoder.fields["general.architecture"] == "qwen3vl"
    assert decoder.fields["qwen3vl.rope.dimension_sections"] == [6, 5, 5, 0]
    assert decoder.fields["qwen3vl.n_deepstack_layers"] == 3
    assert decoder.fields["qwen3vl.attention.key_length"] == 32
    assert decoder.fields["qwen3vl.rope.freq_base"] == 1e4
    assert len(decoder.fields["tokenizer.ggml.tokens"]) == 384


def test_llavas_queries_and_keys_are_turned_as_neighbours(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    decoder = Written(checkpoints["llava"], tmp_path / "decoder", write_decoder)
    turned = {f"blk.{layer}.attn_{one}.weight": (layer, one) for layer in range(4) for one in "qk"}
    assert decoder.check("language_model.", HEAD, turned) == set()
    for name, (layer, one) in turned.items():
        found, heads = decoder.tensors[name], {"q": 4, "k": 2}[one]
        source = f"language_model.layers.{layer}.self_attn.{one}_proj.weight"
        halves = decoder.source(source, found.shape).reshape(heads, 2, 8, 64)
        np.testing.assert_array_equal(found.reshape(heads, 8, 2, 64)[:, :, 0], halves[:, 0])
        np.testing.assert_array_equal(found.reshape(heads, 8, 2, 64)[:, :, 1], halves[:, 1])
    assert decoder.fields["general.architecture"] == "llama"


def test_qwen3s_tower_has_a_patch_embedding_for_each_frame_and_mergers_at_their_blocks(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    tower = Written(checkpoints["qwen3"], tmp_path / "tower", qwen3_tower.write_tower)
    embeddings = ("v.patch_embd.weight", "v.patch_embd.weight.1")
    assert tower.check("visual.", MERGERS, embeddings) == set()
    whole = tower.source("visual.patch_embed.proj.weight", (48, 3, 2, 16, 16))
    for frame, name in enumerate(embeddings):
        np.testing.assert_array_equal(tower.tensors[name], whole[:, :, frame])
    # llama.cpp stretches the table of positions in fp32 alone.
    assert "v.position_embd.weight" not in tower.halved and "v.blk.4.attn_qkv.weight" in tower.halved
    assert tower.fields["clip.projector_type"] == "qwen3vl_merger"
    assert tower.fields["clip.vision.image_size"] == 80
    assert qwen3_tower.visual_tokens(checkpoints["qwen3"]) == (4, 980)


def test_llavas_tower_ends_at_the_layer_whose_states_are_taken(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    tower = Written(checkpoints["llava"], tmp_path / "tower", clip_tower.write_tower)
    left = tower.check("vision_tower.", PROJECTOR)
    assert {name.rpartition(".")[0] for name in left if not name.startswith("v.blk.2.")} == {"v.post_ln"}
    assert len([name for name in left if name.startswith("v.blk.2.")]) == 16
    assert tower.fields["clip.vision.feature_layer"] == [2]
    assert clip_tower.visual_tokens(checkpoints["llava"]) == (576, 576)
