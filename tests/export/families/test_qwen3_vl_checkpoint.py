"""Qwen3-VL configurations as they are found, and what is refused of them."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLMoeConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from sinkprune import Pipeline
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import BundleError, CheckpointError
from sinkprune.contract.families import FAMILIES
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.families import read_family
from sinkprune.export.presets import PRESETS
from sinkprune.export.source import ExportRequest
from sinkprune.runtime.families.rotary import Rotary
from support.models.graphs import parameters_of
from support.models.manifests import manifest_data, write_data
from support.models.qwen_checkpoints import QwenShape, make_qwen_checkpoint
from support.programs.commands import assert_refused, run

# Qwen/Qwen3-VL-2B-Instruct's config.json.
HUB_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 151655,
    "model_type": "qwen3_vl",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "dtype": "bfloat16",
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": 151936,
    },
    "tie_word_embeddings": True,
    "video_token_id": 151656,
    "vision_config": {
        "deepstack_visual_indexes": [5, 11, 17],
        "depth": 24,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1024,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 4096,
        "model_type": "qwen3_vl",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2048,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
}
HUB_PROCESSOR = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
HUB_VIDEO = {**HUB_PROCESSOR, "size": {"longest_edge": 25165824, "shortest_edge": 4096}}
PARAMETERS = {"qwen3-vl-2b": 2_127_532_032, "qwen3-vl-4b": 4_437_815_808, "qwen3-vl-8b": 8_767_123_696}
"""As the hub counts those of the published checkpoints."""


def test_the_hubs_own_configuration_is_the_2b_preset() -> None:
    hub, preset = read_family("hub", HUB_CONFIG), read_family("preset", PRESETS["qwen3-vl-2b"])
    assert hub.language_model == preset.language_model
    assert (hub.language_model.head_dim, hub.language_model.rope_theta) == (128, 5e6)
    assert hub.vision == preset.vision
    assert (hub.vision.position_side, hub.vision.deepstack_blocks, hub.vision.salience_block) == (48, (5, 11, 17), 22)
    assert FAMILIES[hub.name].budgets == FAMILIES["qwen2.5-vl"].budgets
    own = hub.processor(HUB_PROCESSOR)
    assert (own["min_pixels"], own["max_pixels"], own["image_mean"]) == (256 * 256, 4096 * 4096, [0.5] * 3)
    assert hub.tokens_of(hub.processor(HUB_PROCESSOR)).most == 16384


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_of_transformers_and_of_the_hub(name: str) -> None:
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(Qwen3VLConfig.from_dict(copy.deepcopy(PRESETS[name])))
    family, counted = read_family(name, PRESETS[name]), sum(p.numel() for p in model.parameters())
    lm = family.language_model
    # A head of its own, where it shares the table's weights
    twice = lm.vocab_size * lm.hidden_size * PRESETS[name]["tie_word_embeddings"]
    assert (parameters_of(family) - twice, counted) == (PARAMETERS[name], PARAMETERS[name])


def test_the_smaller_ones_tie_their_embeddings() -> None:
    assert [PRESETS[name]["tie_word_embeddings"] for name in PARAMETERS] == [True, True, False]


def test_positions_turn_with_each_axis_in_turn() -> None:
    """Qwen3VLTextRotaryEmbedding, of three positions that differ on every axis."""
    sections = read_family("hub", HUB_CONFIG).language_model.rope_sections
    config = Qwen3VLConfig.from_dict(copy.deepcopy(HUB_CONFIG))
    places = torch.tensor([[3, 40, 500], [7, 11, 13], [1, 200, 30]])
    cos, sin = Qwen3VLTextRotaryEmbedding(config.text_config)(torch.zeros(1), places[:, None])
    found = Rotary(5e6, 128, torch.zeros(0).numpy().dtype, sections).tables(places.numpy())
    for ours, theirs in zip(found, (cos, sin), strict=True):
        assert abs(ours[0] - theirs[0, :, :64].numpy()).max() < 1e-4


def changed(place: tuple[str, ...], value: Any) -> dict[str, Any]:
    config = copy.deepcopy(HUB_CONFIG)
    container = config
    for key in place[:-1]:
        container = container[key]
    container[place[-1]] = value
    return config


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (
            ("vision_config", "deepstack_visual_indexes"),
            [5, 11],
            r"deepstack_visual_indexes is \[5, 11\], expected 3",
        ),
        (("vision_config", "deepstack_visual_indexes"), [5, 11, 17, 20], "only its first segment"),
        (("vision_config", "deepstack_visual_indexes"), [11, 5, 17], "ascending"),
        (("vision_config", "deepstack_visual_indexes"), [5, 11, 24], "deepstack_visual_indexes"),
        (("vision_config", "num_position_embeddings"), 2300, "num_position_embeddings is a square"),
        (
            ("vision_config", "rope_parameters"),
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
            "rope_type.*linear",
        ),
        (("vision_config", "hidden_act"), "gelu", "vision_config.hidden_act"),
        (("vision_config", "out_hidden_size"), 1024, "out_hidden_size"),
        (("text_config", "rope_scaling", "rope_type"), "yarn", "rope_type"),
        (("text_config", "rope_scaling", "mrope_interleaved"), False, "mrope_interleaved is False"),
        (("text_config", "rope_scaling", "mrope_section"), [24, 22, 18], "same number for height and width"),
        (("text_config", "rope_scaling", "mrope_section"), [24, 24, 24], "mrope_section adds up to 64"),
        (("text_config", "model_type"), "qwen3_vl_moe_text", "qwen3_vl_moe_text"),
    ],
)
def test_what_the_graphs_do_not_compute_is_refused(place: tuple[str, ...], value: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        read_family("hub", changed(place, value))


def test_a_mixture_of_experts_is_refused_by_name() -> None:
    config = json.loads(Qwen3VLMoeConfig(architectures=["Qwen3VLMoeForConditionalGeneration"]).to_json_string())
    with pytest.raises(CheckpointError, match="is a Qwen3VLMoeForConditionalGeneration, which is not supported"):
        read_family("hub", config)


def test_clips_have_the_limits_of_their_own_processor() -> None:
    family = read_family("hub", HUB_CONFIG)
    known = family.processor({**HUB_PROCESSOR, "video_processor": HUB_VIDEO, "max_frames": 8})["video"]
    assert (known["min_pixels"], known["max_pixels"], known["max_frames"]) == (4096, 25165824 // 8, 8)
    small = family.processor({**HUB_PROCESSOR, "video_processor": HUB_VIDEO, "max_frames": 8, "max_pixels": 491520})
    assert small["video"]["max_pixels"] == 491520
    with pytest.raises(CheckpointError, match="cap_pixels_per_frame"):
        video = {**HUB_VIDEO, "cap_pixels_per_frame": True}
        family.processor({**HUB_PROCESSOR, "video_processor": video, "max_frames": 8})


def test_a_decoder_that_would_be_cut_before_its_features_are_added_is_refused(tmp_path: Path) -> None:
    make_qwen_checkpoint(tmp_path / "checkpoint", QwenShape(kind="qwen3_vl", num_layers=23))
    outcome = run("sinkprune-export", tmp_path / "checkpoint", "-o", tmp_path / "out", "--budgets", "prune-80")
    assert_refused(outcome, "drops tokens after layer 1", "DeepStack", "No stage may come before layer 2")
    assert not (tmp_path / "out").exists()


def test_names_of_published_checkpoints(checkpoint: Callable[[str], Path]) -> None:
    """The hub's, which transformers writes too, are those that the tests above export."""
    with safe_open(checkpoint("qwen3-vl") / "model.safetensors", framework="np") as file:
        names = set(file.keys())
    assert {
        "model.visual.patch_embed.proj.bias",
        "model.visual.pos_embed.weight",
        "model.visual.blocks.0.mlp.linear_fc1.weight",
        "model.visual.merger.norm.weight",
        "model.visual.deepstack_merger_list.2.linear_fc2.bias",
        "model.language_model.layers.0.self_attn.q_norm.weight",
        "model.language_model.norm.weight",
    } <= names


def test_only_the_first_segment_takes_the_features(bundle: Callable[..., Path]) -> None:
    manifest = read_bundle(bundle("qwen3-vl")).manifest
    takes = {name: {tensor.name for tensor in spec.inputs} for name, spec in manifest.graphs.items()}
    assert [name for name, inputs in takes.items() if "deepstack" in inputs] == [
        "decoder_0",
        *(name for name in takes if name.endswith("/sanitizer")),
    ]
    assert manifest.deepstack_width == 3 * 64
    graph = onnx.load(bundle("qwen3-vl") / "graphs/vision.onnx", load_external_data=False).graph
    shapes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in [*graph.input, *graph.output]
    }
    assert shapes == {
        "pixel_values": ["G", "patches", 3 * 2 * 16 * 16],
        "position_index": ["patches", 4],
        "position_weight": ["patches", 4],
        "cos": ["G", "patches", 6],
        "sin": ["G", "patches", 6],
        "tokens": ["G", "N", 64],
        "norms": ["G", "N"],
        "salience": ["G", "N"],
        "deepstack": ["G", "N", 192],
    }


@pytest.mark.parametrize(
    ("graph", "role", "said"),
    [
        ("decoder_0", "inputs", "'decoder_0' does not take"),
        ("sinkpruner/prune-66.7/sanitizer", "outputs", "kept_deepstack"),
        ("vision", "outputs", "deepstack"),
    ],
)
def test_a_bundle_that_would_lose_the_features_is_refused(
    graph: str, role: str, said: str, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copytree(bundle("qwen3-vl"), tmp_path / "bundle")
    manifest = manifest_data(tmp_path / "bundle")
    spec = manifest["graphs"][graph]
    spec[role] = [tensor for tensor in spec[role] if "deepstack" not in tensor["name"]]
    write_data(tmp_path / "bundle", manifest)
    with pytest.raises(BundleError, match=said):
        read_bundle(tmp_path / "bundle")


def test_random_weights_answer(tmp_path: Path, checkpoint: Callable[[str], Path], photo: Image.Image) -> None:
    config = json.loads((checkpoint("qwen3-vl") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    request = ExportRequest(str(tmp_path), budgets=("prune-77.8",), random_weights=True, weights="int4")
    export_bundle(request, tmp_path / "bundle")
    answer = Pipeline.load(tmp_path / "bundle").generate(photo, "Hm?", budget="prune-77.8", max_new_tokens=3)
    assert answer.visual_tokens == 19 * 12
