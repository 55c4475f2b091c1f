"""Qwen2.5-VL configurations and checkpoints as they are found, and what is refused of them."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from sinkprune import Pipeline
from sinkprune.contract.errors import CheckpointError
from sinkprune.contract.families import FAMILIES
from sinkprune.contract.manifest import decoder_segments
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.dialects import DIALECTS
from sinkprune.export.families import read_family
from sinkprune.export.methods import load_method
from sinkprune.export.precision import PRECISIONS
from sinkprune.export.presets import PRESETS
from sinkprune.export.pruning.plan import PlanFacts
from sinkprune.export.source import ExportRequest
from support.models.graphs import parameters_of
from support.programs.commands import assert_refused, run

# Qwen/Qwen2.5-VL-7B-Instruct's config.json: the decoder's settings stand at the top.
HUB_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 152064,
}
# Where Qwen/Qwen2.5-VL-72B-Instruct's differs
HUB_72B: dict[str, Any] = {
    **HUB_CONFIG,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "max_window_layers": 80,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "vision_config": {**HUB_CONFIG["vision_config"], "intermediate_size": 3456, "out_hidden_size": 8192},
}
CONFIGS = {name: PRESETS[name] for name in ("qwen2.5-vl-3b", "qwen2.5-vl-7b")} | {"72b": HUB_72B}
HUB_PROCESSOR = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
}

# A name as transformers 5 keeps it in memory -> as the published checkpoints store it
PUBLISHED = {"model.visual.": "visual.", "model.language_model.": "model."}


def test_the_hubs_own_configuration_is_the_7b_preset() -> None:
    hub = read_family("hub", HUB_CONFIG)
    preset = read_family("preset", PRESETS["qwen2.5-vl-7b"])
    assert hub.language_model == preset.language_model
    assert hub.language_model.rope_sections == (16, 24, 24)
    assert hub.vision == preset.vision
    assert hub.vision.full_attention_blocks == (7, 15, 23, 31)
    assert (hub.vision.window_side, hub.vision.rope_theta) == (4, 10_000)
    assert hub.tokens_of(hub.processor(HUB_PROCESSOR)).most == 16384


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_transformers(name: str) -> None:
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig.from_dict(copy.deepcopy(CONFIGS[name])))
    assert parameters_of(read_family(name, CONFIGS[name])) == sum(p.numel() for p in model.parameters())


def test_the_72b_is_read_and_planned() -> None:
    family = read_family("hub", HUB_72B)
    model = family.language_model
    assert parameters_of(family) == 73_410_777_344
    assert (model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim) == (80, 64, 8, 128)
    assert (model.hidden_size, family.visual_width, family.vision.intermediate_size) == (8192, 8192, 3456)
    processor = family.processor({**HUB_PROCESSOR, "max_pixels": 376320})
    tokens = family.tokens_of(processor)
    facts = PlanFacts(model, tokens, family.visual_width, PRECISIONS["fp16"], DIALECTS["opset20"])
    for name, budget in FAMILIES[family.name].budgets.items():
        plan = load_method("sinkpruner")(facts, budget)
        assert tuple(plan.select_after) == (2, 6, 15), name
        assert plan.sanitizer is not None
    assert list(family.graphs(decoder_segments((2, 6, 15), 80), ())) == [
        "vision",
        *(f"decoder_{segment}" for segment in range(4)),
        "head",
    ]


def test_names_of_published_checkpoints(
    checkpoint: Callable[[str], Path], pipeline: Callable[..., Pipeline], photo: Image.Image, tmp_path: Path
) -> None:
    folder = tmp_path / "published"
    shutil.copytree(checkpoint("qwen"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(checkpoint("qwen") / "model.safetensors")
    for new, old in PUBLISHED.items():
        tensors = {
            old + name.removeprefix(new) if name.startswith(new) else name: tensor for name, tensor in tensors.items()
        }
    assert {"visual.patch_embed.proj.weight", "model.layers.0.self_attn.q_proj.bias", "lm_head.weight"} <= set(
        tensors
    )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    export_bundle(ExportRequest(str(folder), budgets=("prune-77.8",)), tmp_path / "bundle")
    asked = (photo.resize((300, 200)), "What is this?")
    expected = pipeline("qwen").generate(*asked, budget="prune-77.8", max_new_tokens=8)
    assert Pipeline.load(tmp_path / "bundle").generate(*asked, budget="prune-77.8", max_new_tokens=8).token_ids == (
        expected.token_ids
    )


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("use_sliding_window",), True, "use_sliding_window"),
        (("rope_scaling", "mrope_section"), [16, 24, 23], "mrope_section adds up to 64"),
        (("rope_scaling",), {"type": "yarn", "factor": 4.0, "mrope_section": [16, 24, 24]}, "rope_type"),
        (("vision_config", "out_hidden_size"), 2048, "out_hidden_size"),
        (("vision_config", "window_size"), 100, "window_size is a multiple of 28"),
        (("vision_config", "hidden_act"), "gelu", "hidden_act"),
        (("num_key_value_heads",), 5, "num_key_value_heads"),
    ],
)
def test_what_the_graphs_do_not_compute_is_refused(place: tuple[str, ...], value: Any, said: str) -> None:
    config = copy.deepcopy(HUB_CONFIG)
    container = config
    for key in place[:-1]:
        container = container[key]
    container[place[-1]] = value
    with pytest.raises(CheckpointError, match=said):
        read_family("hub", config)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"patch_size": 16}, "patch_size is 16, expected 14"),
        ({"do_resize": False}, "do_resize"),
        ({"image_processor_type": "CLIPImageProcessor"}, "CLIPImageProcessor"),
        ({"max_pixels": 1000}, "3136 to 1000 pixels"),
        ({"min_pixels": 1, "max_pixels": 783}, "784 pixels of a token"),
        ({"min_pixels": 0}, "0 to 12845056 pixels"),
    ],
)
def test_a_processor_that_does_not_fit_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        read_family("hub", HUB_CONFIG).processor({**HUB_PROCESSOR, **settings})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"resample": 2}, "resample of videos is 2, expected 3"),
        ({"video_processor": {"resample": 0}}, "resample of videos is 0"),
        ({"video_processor": {"image_mean": [0.5, 0.5, 0.5]}}, "image_mean of videos"),
        ({"video_processor": {"cap_pixels_per_frame": True}}, "cap_pixels_per_frame of videos"),
    ],
)
def test_frames_that_would_not_be_made_as_the_model_has_them_are_refused(settings: dict[str, Any], said: str) -> None:
    family = read_family("hub", HUB_CONFIG)
    family.processor({**HUB_PROCESSOR, **settings})
    with pytest.raises(CheckpointError, match=said):
        family.processor({**HUB_PROCESSOR, **settings, "max_frames": 8})


def test_the_processor_may_name_its_limits_in_either_way() -> None:
    family = read_family("hub", HUB_CONFIG)
    named = family.processor({"size": {"shortest_edge": 3136, "longest_edge": 376320}})
    nested = family.processor({"image_processor": {"min_pixels": 3136, "max_pixels": 376320}})
    assert named == nested
    assert (named["min_pixels"], named["max_pixels"]) == (3136, 376320)


def test_the_published_limit_is_too_large_for_topk_and_the_message_says_what_fits(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    export = ("sinkprune-export", checkpoint("qwen"), "-o", tmp_path / "out")
    assert_refused(run(*export, "--max-pixels", 12845056), "16384", "3840", "--max-pixels 6690656")
    assert_refused(run(*export, "--max-pixels", 700), "784 to 700 pixels", "--max-pixels")
    assert list(tmp_path.iterdir()) == []
    assert run(*export, "--max-pixels", 12845056, "--budgets", "prune-88.9").code == 0


def test_pixel_limits_are_for_families_that_take_any_resolution(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    outcome = run("sinkprune-export", checkpoint("gqa-112"), "-o", tmp_path / "out", "--max-pixels", 376320)
    assert_refused(outcome, "'llava'", "--max-pixels")


def test_salience_can_be_chosen_only_where_there_is_a_choice(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    outcome = run("sinkprune-export", checkpoint("gqa-112"), "-o", tmp_path / "out", "--salience", "last")
    assert_refused(outcome, "'llava'", "CLS", "--salience")


def test_limits_given_at_export_are_the_bundles(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    limits = ("--min-pixels", 50176, "--max-pixels", 100352)
    outcome = run("sinkprune-export", checkpoint("qwen"), "-o", tmp_path / "out", *limits, "--budgets", "prune-88.9")
    assert outcome.code == 0, outcome.stderr
    family = Pipeline.load(tmp_path / "out").family
    assert [family.layout(Image.new("RGB", size)).tokens for size in ((28, 28), (2000, 2000))] == [64, 121]


def test_random_weights_answer(tmp_path: Path, checkpoint: Callable[[str], Path], photo: Image.Image) -> None:
    config = json.loads((checkpoint("qwen") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    export_bundle(ExportRequest(str(tmp_path), budgets=("prune-77.8",), random_weights=True), tmp_path / "bundle")
    answer = Pipeline.load(tmp_path / "bundle").generate(photo, "Hm?", budget="prune-77.8", max_new_tokens=3)
    assert answer.visual_tokens == 21 * 14
