"""LLaVA-NeXT configurations and checkpoints as they are found, and what is refused of them."""

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
from transformers import LlavaNextConfig, LlavaNextForConditionalGeneration

from sinkprune import Pipeline
from sinkprune.contract.errors import CheckpointError
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.families import read_family
from sinkprune.export.presets import PRESETS
from sinkprune.export.source import ExportRequest
from support.models.graphs import parameters_of
from support.programs.commands import assert_refused, run

PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
# llava-hf/llava-v1.6-mistral-7b-hf's config.json
HUB_CONFIG: dict[str, Any] = {
    "architectures": ["LlavaNextForConditionalGeneration"],
    "ignore_index": -100,
    "image_grid_pinpoints": PINPOINTS,
    "image_token_index": 32000,
    "model_type": "llava_next",
    "projector_hidden_act": "gelu",
    "text_config": {
        "_name_or_path": "mistralai/Mistral-7B-Instruct-v0.2",
        "architectures": ["MistralForCausalLM"],
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "vocab_size": 32064,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_image_newline_parameter": True,
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
# Where llava-hf/llava-v1.6-vicuna-7b-hf's differs
HUB_VICUNA: dict[str, Any] = {
    **HUB_CONFIG,
    "text_config": {
        "_name_or_path": "lmsys/vicuna-7b-v1.5",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "pad_token_id": 0,
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float16",
        "vocab_size": 32064,
    },
}
HUB_PROCESSOR: dict[str, Any] = {
    "aspect_ratio_setting": "anyres",
    "crop_size": {"height": 336, "width": 336},
    "do_center_crop": True,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_grid_pinpoints": PINPOINTS,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_processor_type": "LlavaNextImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "processor_class": "LlavaNextProcessor",
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "size": {"shortest_edge": 336},
}
# A name as transformers 5 keeps it in memory -> as the published checkpoints store it
PUBLISHED = {
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.vision_model.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.image_newline": "image_newline",
    "lm_head.": "language_model.lm_head.",
}


@pytest.mark.parametrize(
    ("config", "name", "rope_theta", "kv_heads"),
    [(HUB_CONFIG, "llava-next-mistral-7b", 1e6, 8), (HUB_VICUNA, "llava-next-7b", 1e4, 32)],
    ids=["mistral", "vicuna"],
)
def test_the_hubs_own_configurations_are_presets(
    config: dict[str, Any], name: str, rope_theta: float, kv_heads: int
) -> None:
    hub, preset = read_family("hub", config), read_family("preset", PRESETS[name])
    assert hub.language_model == preset.language_model
    assert (hub.language_model.rope_theta, hub.language_model.num_kv_heads) == (rope_theta, kv_heads)
    assert parameters_of(hub) == parameters_of(preset)
    assert hub.vision == preset.vision
    assert hub.most_groups == 5
    processor = hub.processor(HUB_PROCESSOR)
    assert processor == preset.processor({})
    assert hub.tokens_of(processor) == 576


@pytest.mark.parametrize("name", ["llava-next-7b", "llava-next-mistral-7b"])
def test_parameters_are_those_of_transformers_but_for_the_last_vision_block(name: str) -> None:
    with torch.device("meta"):
        model = LlavaNextForConditionalGeneration(LlavaNextConfig.from_dict(copy.deepcopy(PRESETS[name])))
    unused = ("vision_tower.encoder.layers.23.", "vision_tower.post_layernorm.")
    used = [p.numel() for n, p in model.named_parameters() if not any(part in n for part in unused)]
    assert parameters_of(read_family(name, PRESETS[name])) == sum(used)


@pytest.mark.parametrize(("name", "turn"), [("llava-next-7b", "USER: <image>"), ("llava-next-mistral-7b", "[INST] ")])
def test_a_preset_has_its_decoders_template(name: str, turn: str) -> None:
    import jinja2

    content = [{"type": "image"}, {"type": "text", "text": "What?"}]
    template = jinja2.Template(read_family(name, PRESETS[name]).chat_template)
    text = template.render(messages=[{"role": "user", "content": content}], add_generation_prompt=True)
    assert text.startswith(turn)
    assert text.count("<image>") == 1


@pytest.mark.parametrize("naming", ["published", "in memory"])
def test_names_of_other_versions(
    naming: str,
    checkpoint: Callable[[str], Path],
    pipeline: Callable[..., Pipeline],
    photo: Image.Image,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint("next"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    if naming == "in memory":
        model = LlavaNextForConditionalGeneration.from_pretrained(checkpoint("next"))
        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    else:
        tensors = load_file(checkpoint("next") / "model.safetensors")
        for new, old in PUBLISHED.items():
            tensors = {name.replace(new, old) if name.startswith(new) else name: x for name, x in tensors.items()}
        assert "image_newline" in tensors or "model.image_newline" in tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    export_bundle(ExportRequest(str(folder), budgets=("retain-320",)), tmp_path / "bundle")
    answers = [
        pipe.generate(photo, "What?", max_new_tokens=8).token_ids
        for pipe in (pipeline("next"), Pipeline.load(tmp_path / "bundle"))
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"image_grid_pinpoints": [[336, 500]]}, r"\[\[336, 500\]\], expected pairs .* multiples .* 336"),
        ({"image_grid_pinpoints": []}, "expected pairs"),
        ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy is 'full'"),
        ({"text_config": {**HUB_CONFIG["text_config"], "sliding_window": 4096}}, "sliding_window is 4096"),
        ({"text_config": {"model_type": "qwen2"}}, "model_type is 'qwen2', expected llama or mistral"),
    ],
)
def test_configurations_these_graphs_do_not_compute(change: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        read_family("hub", {**HUB_CONFIG, **change})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, "'CLIPImageProcessor', expected LlavaNextImageProcessor"),
        ({"size": {"shortest_edge": 224}}, "shows the whole image at .*224.*, expected 336"),
        ({"image_grid_pinpoints": PINPOINTS[:2]}, "image_grid_pinpoints .* do not belong together"),
        ({"crop_size": 224}, "224.* expected 336x336"),
    ],
)
def test_processors_that_do_not_belong_to_the_tower(change: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        read_family("hub", HUB_CONFIG).processor({**HUB_PROCESSOR, **change})


def test_the_commands_run_a_checkpoint(checkpoint: Callable[[str], Path], photo_file: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    assert run("sinkprune-export", checkpoint("next"), "-o", bundle).code == 0
    ask = ("--image", photo_file, "--prompt", "What?")
    picture = tmp_path / "kept.png"
    outcome = run("sinkprune-run", bundle, *ask, "--budget", "retain-160", "--json", "--overlay", picture)
    assert outcome.code == 0, outcome.stderr
    answer = json.loads(outcome.stdout)
    # 600x400 shows on two tiles by two
    assert (answer["visual_tokens"], answer["kept_after_sanitizer"]) == (5 * 64, 5 * 7)
    with Image.open(picture) as drawn:
        assert drawn.width == 2 * 1100 + 12
    outcome = run("sinkprune-profile", bundle, *ask, "--repeat", 1, "--new-tokens", 2, "--json", tmp_path / "p.json")
    assert outcome.code == 0, outcome.stderr
    reports = json.loads((tmp_path / "p.json").read_text())["budgets"]
    # 8x8 of the whole photo; on the canvas it keeps 10 of 16 lines, each of 16 tokens and a newline
    unpruned = reports["none"]
    assert unpruned["tokens_per_layer"] == [unpruned["kept_after_sanitizer"]] * 6
    assert unpruned["kept_after_sanitizer"] == 64 + 10 * 17
    assert_refused(run("sinkprune-run", bundle, *ask, "--budget", "retain-64"), "retain-320, retain-160")
