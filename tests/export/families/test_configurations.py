"""Published configurations: their facts, and variants that are rejected by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PI0Config, PI0ForConditionalGeneration

from sinkprune.contract.errors import CheckpointError
from sinkprune.export.checkpoint.presets import PRESETS, SAME_SHAPES
from sinkprune.export.families import read_family
from sinkprune.export.source import ExportRequest, open_source
from support.models.graphs import parameters_of
from support.models.published_configs import PINPOINTS, PROCESSORS, PUBLISHED, with_value

FACTS: dict[str, dict[str, Any]] = {
    "llava-1.5-7b": {"language_model.rope_theta": 10_000, "vision.tokens": 576, "image_token": 32000},
    "internvl3-1b": {"language_model.max_positions": 32768, "language_model.rope_factor": 1.0, "visual_width": 4096},
    "internvl3.5-1b": {"vision.num_blocks": 24, "image_token": 151671},
    "paligemma-3b-224": {"causal": False, "vision.salience_block": 25, "embedding_scale": 2048**0.5},
    "paligemma-3b-448": {"vision.tokens": 1024, "image_token": 257152},
    "llava-next-7b": {"language_model.rope_theta": 1e4, "most_groups": 5},
    "llava-next-mistral-7b": {"language_model.rope_theta": 1e6, "most_groups": 5},
    "qwen2-vl-7b": {"language_model.rope_sections": (16, 24, 24), "vision.salience_block": 30},
    "qwen2.5-vl-7b": {"vision.full_attention_blocks": (7, 15, 23, 31), "vision.window_side": 4},
    "qwen3-vl-2b": {"language_model.rope_theta": 5e6, "vision.position_side": 48, "vision.salience_block": 22},
    "cosmos3-nano": {"name": "qwen3-vl", "vision.deepstack_blocks": (8, 16, 24), "vision.patch_size": 16},
}
"""Facts that neither counts of parameters nor presets check."""
COUNTED = {"qwen3-vl-2b": 2_127_532_032, "qwen3-vl-4b": 4_437_815_808, "qwen3-vl-8b": 8_767_123_696}
"""Parameters of published checkpoints, as the hub counts them."""
TEXT, VISION = "text_config", "vision_config"


@pytest.mark.parametrize("name", FACTS)
def test_a_published_configuration_is_its_preset(name: str) -> None:
    found, preset = read_family("hub", PUBLISHED[name]), read_family("preset", PRESETS[name])
    assert found.language_model == preset.language_model
    assert found.vision == preset.vision
    assert parameters_of(found) == parameters_of(preset)
    assert {fact: attrgetter(fact)(found) for fact in FACTS[name]} == FACTS[name]


@pytest.mark.parametrize(
    ("name", "tokens", "settings"),
    [
        ("internvl3-1b", 256, {"max_patches": 12, "image_mean": [0.485, 0.456, 0.406]}),
        ("paligemma-3b-448", 1024, {"do_resize": True, "do_center_crop": False, "image_mean": [0.5] * 3}),
        ("llava-next-mistral-7b", 576, {"image_grid_pinpoints": PINPOINTS}),
        ("qwen2.5-vl-7b", 16384, {"min_pixels": 56 * 56}),
        ("qwen3-vl-2b", 16384, {"min_pixels": 256**2, "max_pixels": 4096**2, "image_mean": [0.5] * 3}),
    ],
)
def test_a_published_processor_is_read(name: str, tokens: int, settings: dict[str, Any]) -> None:
    family = read_family("hub", PUBLISHED[name])
    known = family.processor(PROCESSORS[name])
    assert known.items() >= settings.items()
    most = family.tokens_of(known)
    assert (most if isinstance(most, int) else most.most) == tokens
    if name.startswith("llava"):
        assert known == read_family("preset", PRESETS[name]).processor({})


# Policies are counted below, and what differs from others by its size alone not at all.
NOT_COUNTED = {"pi0", "pi0.5", "pi0-fast", "openvla-7b", "openvla-7b-oft", *SAME_SHAPES}
NOT_COUNTED |= {"llava-1.1b", "llava-1.5-13b", "paligemma-3b-224", "paligemma-3b-448"}


@pytest.mark.parametrize("name", sorted({*PRESETS, "qwen2.5-vl-72b"} - NOT_COUNTED))
def test_parameters_are_those_of_transformers(name: str) -> None:
    config = PRESETS.get(name) or PUBLISHED[name]
    with torch.device("meta"):
        own = AutoConfig.for_model(**copy.deepcopy(config))
        model = AutoModelForImageTextToText.from_config(own)
    # The graphs of CLIP towers leave out what comes after the feature layer.
    clip = ("vision_tower.encoder.layers.23.", "vision_tower.post_layernorm.")
    unused = clip if name.startswith("llava") else ()
    used = [p.numel() for n, p in model.named_parameters() if not any(part in n for part in unused)]
    family = read_family(name, config)
    lm = family.language_model
    # A bundle stores the table and the head apart, where they share weights.
    twice = lm.vocab_size * lm.hidden_size if own.tie_word_embeddings else 0
    assert parameters_of(family) - twice == sum(used)
    assert COUNTED.get(name, sum(used)) == sum(used)
    assert name not in COUNTED or bool(twice) == (name != "qwen3-vl-8b")


def test_parameters_of_a_policy_are_those_of_transformers() -> None:
    config = PRESETS["pi0"]
    with torch.device("meta"):
        model = PI0ForConditionalGeneration(PI0Config(**copy.deepcopy(config)))
    named = {name: parameter.numel() for name, parameter in model.named_parameters()}
    # The expert embeds no tokens, and reads the decoder's keys and values only. The export's estimate counts the last
    # layer as a whole, of which the graph has keys and values.
    unused = ("model.dit.embed_tokens.weight", "model.vlm.language_model.norm.weight")
    family = read_family("pi0", config)
    assert parameters_of(family) == sum(named.values()) - sum(named[name] for name in unused)
    facts = family.policy({})
    assert facts is not None
    assert (facts.chunk, facts.state_dim, facts.action_dim, facts.steps) == (50, 32, 32, 10)
    assert (family.tokens_of({}), family.language_model.num_layers) == (256, 18)


def test_parameters_of_openvla_are_those_of_its_files() -> None:
    """The shards of openvla-7b have 15082600824 bytes in bfloat16, with their headers."""
    plain, with_head = (read_family(name, PRESETS[name]) for name in ("openvla-7b", "openvla-7b-oft"))
    # The last block of each tower, layer scales, norms and attention pooling are in no graph.
    unused = 13 * 1024 + 19 * 1152 + 2 * 4304 + 4096 + 4 * 1024**2 + 8 * 1152**2 + 2 * 1024 * 4096 + 4 * 1152 * 4304
    assert 0 < 15082600824 - 2 * (parameters_of(plain) + unused) < 500_000
    # The heads of OpenVLA-OFT have 302242674 bytes in bfloat16 and 67275256 in float32.
    lm = with_head.language_model
    extra = parameters_of(with_head) - parameters_of(plain) + lm.vocab_size * lm.hidden_size
    state = 8 * 4096 + 4096 + 4096**2 + 4096
    assert 0 < 302242674 - 2 * (extra - state) < 20_000 and 0 < 67275256 - 4 * state < 20_000


LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
SIGLIP = "siglip_vision_model"
SQUARE = {"height": 448, "width": 448}
YARN = {"type": "yarn", "factor": 4.0, "mrope_section": [16, 24, 24]}


def test_a_sliding_window_is_the_most_positions() -> None:
    """Rows of a shorter context are all within the window."""
    for window, most in ((4096, 4096), (65536, 32768), (None, 32768)):
        config = with_value(PUBLISHED["llava-next-mistral-7b"], (TEXT, "sliding_window"), window)
        assert read_family("hub", config).language_model.max_positions == most


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("internvl3-1b", (TEXT, "model_type"), "llama", "model_type is 'llama', expected qwen2 or qwen3"),
        ("internvl3-1b", (TEXT, "rope_scaling"), YARN, "rope_type is 'yarn', expected default or linear or dynamic"),
        ("internvl3-1b", (TEXT, "use_sliding_window"), True, "use_sliding_window is True"),
        ("internvl3-1b", (VISION, "norm_type"), "batch", "vision_config.norm_type is 'batch', expected layer_norm"),
        ("internvl3-1b", (VISION, "use_absolute_position_embeddings"), False, "use_absolute_position_embeddings"),
        ("internvl3-1b", (VISION, "image_size"), [448, 336], r"image_size is a square; found \[448, 336\]"),
        ("internvl3-1b", (VISION, "patch_size"), [16, 16], "image_seq_length is 196, .*; found 256"),
        ("internvl3-1b", (VISION, "num_attention_heads"), 15, "hidden_size is a multiple of num_attention_heads"),
        ("internvl3-1b", ("downsample_ratio",), 0.3, "downsample_ratio is 1 over a divisor of 32.*; found 0.3"),
        ("internvl3-1b", ("vision_feature_layer",), -2, "vision_feature_layer is -2, expected -1"),
        ("internvl3-1b", ("vision_feature_select_strategy",), "full", "select_strategy is 'full', expected default"),
        ("paligemma-3b-448", (TEXT, "model_type"), "gemma2", "it is PaliGemma 2, whose decoder is Gemma 2"),
        ("paligemma-3b-448", ("projection_dim",), 1024, "vision_config.projection_dim is 1024, expected 2048"),
        ("llava-1.5-7b", (TEXT, "model_type"), "granite", "model_type is 'granite', expected llama or mistral"),
        ("llava-1.5-7b", (TEXT, "rope_parameters"), DYNAMIC, "rope_type is 'dynamic', expected default or linear"),
        ("llava-1.5-7b", (TEXT, "num_key_value_heads"), 3, "expected .*; found .* 32 heads, 3 key-value heads"),
        ("llava-1.5-7b", (VISION, "model_type"), SIGLIP, "select_strategy is 'default', expected full"),
        ("llava-1.5-7b", ("vision_feature_select_strategy",), "full", "select_strategy is 'full', expected default"),
        ("llava-1.5-7b", ("vision_feature_layer",), 25, "vision_feature_layer 25 is none of the tower's 24 blocks"),
        ("llava-next-7b", ("image_grid_pinpoints",), [[336, 500]], r"\[\[336, 500\]\], expected pairs .* of .* 336"),
        ("qwen2-vl-7b", (VISION, "hidden_act"), "gelu", "vision_config.hidden_act is 'gelu', expected quick_gelu"),
        ("qwen2-vl-7b", (VISION, "depth"), 1, "two blocks at least"),
        ("qwen2.5-vl-7b", ("rope_scaling", "mrope_section"), [16, 24, 23], "mrope_section adds up to 64"),
        ("qwen2.5-vl-7b", ("rope_scaling",), YARN, "rope_type"),
        ("qwen2.5-vl-7b", (VISION, "out_hidden_size"), 2048, "out_hidden_size"),
        ("qwen2.5-vl-7b", (VISION, "window_size"), 100, "window_size is a multiple of 28"),
        ("qwen3-vl-2b", (VISION, "deepstack_visual_indexes"), [5, 11], r"indexes is \[5, 11\], expected 3"),
        ("qwen3-vl-2b", (VISION, "deepstack_visual_indexes"), [11, 5, 17], "ascending"),
        ("qwen3-vl-2b", (VISION, "num_position_embeddings"), 2300, "num_position_embeddings is a square"),
        ("qwen3-vl-2b", (VISION, "rope_parameters"), LINEAR, "rope_type.*linear"),
        ("qwen3-vl-2b", (TEXT, "rope_scaling", "mrope_interleaved"), False, "mrope_interleaved is False"),
        ("qwen3-vl-2b", (TEXT, "rope_scaling", "mrope_section"), [24, 22, 18], "same number for height and width"),
        ("qwen3-vl-2b", (TEXT, "model_type"), "qwen3_vl_moe_text", "qwen3_vl_moe_text"),
    ],
)
def test_what_the_graphs_do_not_compute_is_rejected(name: str, place: Any, value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_family("hub", with_value(PUBLISHED[name], place, value))


OF_CLIPS: list[dict[str, Any]] = [{"do_sample_frames": True}, {"resample": 2}, {"do_center_crop": True}]


def clips(**own: Any) -> dict[str, Any]:
    return {"max_frames": 4, "video_processor": {"size": SQUARE, **own}}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("internvl3-1b", {"image_processor_type": "CLIPImageProcessor"}, "expected GotOcr2ImageProcessor"),
        ("internvl3-1b", {"size": {"height": 384, "width": 384}}, "size is .*384.*, expected .*448"),
        ("internvl3-1b", {"min_patches": 9, "max_patches": 8}, "min_patches 9 and max_patches 8"),
        ("internvl3-1b", {"max_frames": 4, "video_processor": {}}, "size of videos is .*384.*, expected .*448"),
        ("internvl3-1b", {"max_frames": 4, "do_resize": None}, "do_resize is False, expected True"),
        *(("internvl3-1b", clips(**own), f"{name} of videos") for own in OF_CLIPS for name in own),
        ("paligemma-3b-448", {"image_seq_length": 256}, "image_seq_length is 256, expected 1024"),
        ("llava-next-mistral-7b", {"size": {"shortest_edge": 224}}, "shows the whole image at .*224.*, expected 336"),
        ("llava-next-mistral-7b", {"image_grid_pinpoints": PINPOINTS[:2]}, "pinpoints .* do not belong together"),
        ("qwen2.5-vl-7b", {"patch_size": 16}, "patch_size is 16, expected 14"),
        ("qwen2.5-vl-7b", {"min_pixels": 1, "max_pixels": 783}, "784 pixels of a token"),
    ],
)
def test_a_processor_that_does_not_fit_is_rejected(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_family("hub", PUBLISHED[name]).processor({**PROCESSORS[name], **settings})


@pytest.mark.parametrize("name", ["gqa-112", "next", "qwen-tied", "qwen3-vl", "internvl"])
def test_settings_may_lie_in_processor_config(name: str, copied: Callable[..., Path]) -> None:
    folder = copied(name)
    at_the_top = opened(folder)
    pictures, clips = folder / "preprocessor_config.json", folder / "video_preprocessor_config.json"
    nested = {"image_processor": json.loads(pictures.read_text())}
    if "video" in at_the_top:
        nested["video_processor"] = json.loads((clips if clips.exists() else pictures).read_text())
        clips.write_text(json.dumps({**nested["video_processor"], "fps": 7}))
    # transformers 5 saves the nested form, and leaves files of former versions where they are.
    pictures.write_text(json.dumps({**nested["image_processor"], "do_convert_rgb": False}))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Any"}))
    assert opened(folder)["do_convert_rgb"] is False
    (folder / "processor_config.json").write_text(json.dumps(nested))
    assert opened(folder) == at_the_top
    pictures.unlink()
    clips.unlink(missing_ok=True)
    assert opened(folder) == at_the_top
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": 5}))
    with pytest.raises(CheckpointError, match=r"image_processor of processor_config\.json is malformed .* found 5"):
        opened(folder)


def opened(folder: Path) -> dict[str, Any]:
    """Return the processor's settings of a checkpoint, for clips too where its family has them."""
    takes_video = json.loads((folder / "config.json").read_text())["model_type"].startswith(("qwen", "internvl"))
    source = open_source(ExportRequest(str(folder), max_frames=4 if takes_video else 0))
    source.weights.close()
    return source.processor
