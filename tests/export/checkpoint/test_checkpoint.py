"""Checkpoints as they are found: sharded, bfloat16, and under the names of several transformers versions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import LlavaForConditionalGeneration

from sinkprune import Pipeline
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.families import read_family
from sinkprune.export.presets import PRESETS
from sinkprune.export.source import ExportRequest

ASK = "What is in the picture?"

# A name as transformers 5 keeps it in memory -> as hub checkpoints made before 4.52 store it
LEGACY = {
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "lm_head.": "language_model.lm_head.",
}


# llava-hf/llava-1.5-7b-hf's config.json: most of the decoder's shape is left to Llama's defaults.
HUB_CONFIG = {
    "architectures": ["LlavaForConditionalGeneration"],
    "ignore_index": -100,
    "image_token_index": 32000,
    "model_type": "llava",
    "pad_token_id": 32001,
    "projector_hidden_act": "gelu",
    "text_config": {
        "_name_or_path": "lmsys/vicuna-7b-v1.5",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float16",
        "vocab_size": 32064,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "vocab_size": 32064,
}


def test_the_hubs_own_configuration_is_the_7b_preset() -> None:
    hub = read_family("hub", HUB_CONFIG)
    preset = read_family("preset", PRESETS["llava-1.5-7b"])
    assert hub.language_model == preset.language_model
    assert hub.language_model.num_layers == 32
    assert hub.language_model.hidden_size == 128 * hub.language_model.num_heads == 4096
    assert hub.language_model.rope_theta == 10_000
    assert hub.vision == preset.vision
    assert hub.vision.tokens == 576
    assert hub.image_token == 32000


def copy_without_weights(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*.safetensors"))
    return to


def answer_of(folder: Path, bundle: Path, photo: Image.Image, precision: str = "fp32") -> list[int]:
    export_bundle(ExportRequest(str(folder), budgets=("retain-64",), precision=precision), bundle)
    return Pipeline.load(bundle).generate(photo, ASK, budget="retain-64", max_new_tokens=12).token_ids


@pytest.fixture
def expected(pipeline: Callable[..., Pipeline], photo: Image.Image) -> list[int]:
    return pipeline("mha-336").generate(photo, ASK, budget="retain-64", max_new_tokens=12).token_ids


@pytest.mark.parametrize("naming", ["legacy", "in memory"])
def test_names_of_other_versions(
    naming: str, checkpoint: Callable[[str], Path], expected: list[int], photo: Image.Image, tmp_path: Path
) -> None:
    folder = copy_without_weights(checkpoint("mha-336"), tmp_path / "checkpoint")
    model = LlavaForConditionalGeneration.from_pretrained(checkpoint("mha-336"))
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if naming == "legacy":
        for new, old in LEGACY.items():
            tensors = {
                old + name.removeprefix(new) if name.startswith(new) else name: tensor
                for name, tensor in tensors.items()
            }
        tensors = {
            name.replace("vision_tower.", "vision_tower.vision_model.")
            if name.startswith("vision_tower.") and "vision_model" not in name
            else name: tensor
            for name, tensor in tensors.items()
        }
        assert "language_model.model.layers.0.mlp.up_proj.weight" in tensors
        assert "vision_tower.vision_model.pre_layrnorm.weight" in tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert answer_of(folder, tmp_path / "bundle", photo) == expected


def test_sharded(checkpoint: Callable[[str], Path], expected: list[int], photo: Image.Image, tmp_path: Path) -> None:
    folder = copy_without_weights(checkpoint("mha-336"), tmp_path / "checkpoint")
    LlavaForConditionalGeneration.from_pretrained(checkpoint("mha-336")).save_pretrained(
        folder, max_shard_size="300KB"
    )
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    assert answer_of(folder, tmp_path / "bundle", photo) == expected


def test_bfloat16_becomes_fp32_exactly(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy_without_weights(checkpoint("mha-336"), tmp_path / "checkpoint")
    tensors = {
        name: t.to(torch.bfloat16) for name, t in load_file(checkpoint("mha-336") / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    manifest = export_bundle(ExportRequest(str(folder), budgets=("retain-64",)), tmp_path / "bundle")
    assert manifest.precision == "fp32"
    held = np.fromfile(tmp_path / "bundle/graphs/weights/head.bin", np.float32)
    name = next(name for name in tensors if name.endswith("lm_head.weight"))
    head = tensors[name].float().numpy().T.ravel()
    np.testing.assert_array_equal(held[-head.size :], head)


def test_processor_and_stop_tokens_come_from_the_checkpoint(
    checkpoint: Callable[[str], Path], photo: Image.Image, tmp_path: Path
) -> None:
    folder = copy_without_weights(checkpoint("gqa-112"), tmp_path / "checkpoint")
    shutil.copy(checkpoint("gqa-112") / "model.safetensors", folder)
    path = next(path for path in folder.glob("*processor_config.json"))
    settings = json.loads(path.read_text())
    settings["image_mean"] = [0.1, 0.2, 0.3]
    path.write_text(json.dumps(settings))
    generation = folder / "generation_config.json"
    generation.write_text(json.dumps({**json.loads(generation.read_text()), "eos_token_id": [2, 7]}))
    manifest = export_bundle(ExportRequest(str(folder), budgets=("retain-64",)), tmp_path / "bundle")
    assert manifest.processor["image_mean"] == [0.1, 0.2, 0.3]
    assert manifest.tokens.stop == (2, 7)
