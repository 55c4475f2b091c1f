"""Checkpoints of each family as published: sharded, in bfloat16, with names of several transformers versions."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from sinkprune import Pipeline
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.precision import WeightsName
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest, open_source
from support.programs.commands import assert_refused, run

Checkpoints = Callable[[str], Path]
BUDGETS = {
    "mha-336": "retain-64",
    "next": "retain-320",
    "qwen": "prune-77.8",
    "qwen3-vl": "prune-77.8",
    "internvl": "prune-66.7",
}
LLAVA = {
    r"^model\.language_model\.": "language_model.model.",
    r"^model\.vision_tower\.": "vision_tower.vision_model.",
    r"^model\.multi_modal_projector\.": "multi_modal_projector.",
    r"^model\.image_newline": "image_newline",
    r"^lm_head\.": "language_model.lm_head.",
}
INTERNVL = {**LLAVA, r"^model\.vision_tower\.": "vision_tower."}
QWEN = {r"^model\.visual\.": "visual.", r"^model\.language_model\.": "model."}
NAMINGS: dict[str, tuple[str, dict[str, str], set[str]]] = {
    "llava in memory": ("mha-336", {}, {"model.language_model.norm.weight"}),
    "llava before 4.52": (
        "mha-336",
        LLAVA,
        {"language_model.model.layers.0.mlp.up_proj.weight", "vision_tower.vision_model.pre_layrnorm.weight"},
    ),
    "internvl in memory": ("internvl", {}, {"model.vision_tower.encoder.layer.0.lambda_1"}),
    "internvl published": (
        "internvl",
        INTERNVL,
        {"vision_tower.embeddings.cls_token", "language_model.lm_head.weight", "multi_modal_projector.linear_1.bias"},
    ),
    "llava-next in memory": ("next", {}, {"model.image_newline"}),
    "llava-next published": ("next", LLAVA, {"image_newline", "language_model.lm_head.weight"}),
    "qwen published": (
        "qwen",
        QWEN,
        {"visual.patch_embed.proj.weight", "model.layers.0.self_attn.q_proj.bias", "lm_head.weight"},
    ),
    "cosmos3 published": (
        "qwen3-vl",
        {r"^model\.(visual|language_model)\.": "", r"attn\.([qkv])_proj": r"attn.to_\1", "o_proj": "to_out.0"}
        | {r"self_attn\.([qk])_norm": r"self_attn.norm_\1"},
        {"blocks.0.attn.qkv.weight", "layers.0.self_attn.to_out.0.weight", "layers.1.self_attn.norm_k.weight"},
    ),
}
"""A checkpoint, how it renames what transformers 5 keeps in memory, and some names that result."""


def without_weights(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*.safetensors")))


def tokens(pipeline: Pipeline, name: str, photo: Image.Image) -> list[int]:
    """The token ids of an answer about a small picture."""
    image = photo.resize((300, 200))
    return pipeline.generate(image, "What is this?", budget=BUDGETS[name], max_new_tokens=12).token_ids


def tokens_of(folder: Path, output: Path, name: str, photo: Image.Image) -> list[int]:
    """The same of a checkpoint that has yet to be exported."""
    export_bundle(ExportRequest(str(folder), budgets=(BUDGETS[name],)), output)
    return tokens(Pipeline.load(output), name, photo)


@pytest.mark.parametrize("naming", NAMINGS)
def test_names_of_other_versions(
    naming: str, checkpoint: Checkpoints, pipeline: Callable[..., Pipeline], photo: Image.Image, tmp_path: Path
) -> None:
    name, renamed, some = NAMINGS[naming]
    tensors = AutoModelForImageTextToText.from_pretrained(checkpoint(name)).state_dict()
    for new, old in renamed.items():
        tensors = {re.sub(new, old, key): tensor for key, tensor in tensors.items()}
    assert some <= tensors.keys()
    folder = without_weights(checkpoint(name), tmp_path / "checkpoint")
    held = {key: tensor.contiguous() for key, tensor in tensors.items()}
    if naming.startswith("cosmos3"):
        # Tensors of the part that makes videos, and the names of its class.
        held |= {key: torch.zeros(2, 2) for key in ("layers.0.self_attn.add_q_proj.weight", "proj_in.weight")}
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config |= {"model_type": "cosmos3_omni", "architectures": ["Cosmos3ForConditionalGeneration"], "model": {}}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    assert tokens_of(folder, tmp_path / "bundle", name, photo) == tokens(pipeline(name), name, photo)


def test_sharded(
    checkpoint: Checkpoints, pipeline: Callable[..., Pipeline], photo: Image.Image, tmp_path: Path
) -> None:
    folder = without_weights(checkpoint("mha-336"), tmp_path / "checkpoint")
    model = AutoModelForImageTextToText.from_pretrained(checkpoint("mha-336"))
    model.save_pretrained(folder, max_shard_size="300KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    found = tokens_of(folder, tmp_path / "bundle", "mha-336", photo)
    assert found == tokens(pipeline("mha-336"), "mha-336", photo)


def test_bfloat16_becomes_fp32_exactly(checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = without_weights(checkpoint("mha-336"), tmp_path / "checkpoint")
    stored = load_file(checkpoint("mha-336") / "model.safetensors")
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in stored.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    manifest = export_bundle(ExportRequest(str(folder), budgets=("retain-64",)), tmp_path / "bundle")
    assert manifest.precision == "fp32"
    held = np.fromfile(tmp_path / "bundle/graphs/weights/head.bin", np.float32)
    name = next(name for name in tensors if name.endswith("lm_head.weight"))
    head = tensors[name].float().numpy().T.ravel()
    np.testing.assert_array_equal(held[-head.size :], head)


@pytest.mark.parametrize(
    ("name", "weights", "visual_tokens"), [("qwen", None, 21 * 14), ("qwen3-vl", "int4", 19 * 12)]
)
def test_random_weights_answer(
    name: str,
    weights: WeightsName | None,
    visual_tokens: int,
    checkpoint: Checkpoints,
    photo: Image.Image,
    tmp_path: Path,
) -> None:
    shutil.copy(checkpoint(name) / "config.json", tmp_path)
    request = ExportRequest(str(tmp_path), budgets=("prune-77.8",), random_weights=True, weights=weights)
    export_bundle(request, tmp_path / "bundle")
    answer = Pipeline.load(tmp_path / "bundle").generate(photo, "Hm?", budget="prune-77.8", max_new_tokens=3)
    assert answer.visual_tokens == visual_tokens


def test_a_limit_that_is_too_large_for_topk_is_rejected_with_what_fits(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    export = ("sinkprune-export", checkpoint("qwen"), "-o", tmp_path / "out", "--precision", "fp16")
    assert_refused(run(*export, "--max-pixels", 12845056), "16384", "3840", "--max-pixels 6690656")
    assert_refused(run(*export, "--max-pixels", 700), "784 to 700 pixels", "--max-pixels")
    assert list(tmp_path.iterdir()) == []
    assert run(*export, "--max-pixels", 12845056, "--budgets", "prune-88.9").code == 0


@pytest.mark.parametrize(
    ("name", "own", "given", "pixels", "tokens"),
    [
        # As published
        ("qwen", {"min_pixels": 3136, "max_pixels": 12845056}, {}, 1280 * 784, 1280),
        ("qwen3-vl", {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}, {}, 1280 * 1024, 1280),
        # A limit of the checkpoint that is lower, and a request
        ("qwen", {"max_pixels": 376320}, {}, 376320, 480),
        # Small images that are enlarged to more
        ("qwen", {"max_pixels": 12845056}, {"min_pixels": 2000 * 784}, 2000 * 784, 2000),
    ],
)
def test_images_have_tokens_for_a_robot_unless_it_asks_for_more(
    name: str,
    own: dict[str, Any],
    given: dict[str, int],
    pixels: int,
    tokens: int,
    checkpoint: Checkpoints,
    tmp_path: Path,
) -> None:
    folder = Path(shutil.copytree(checkpoint(name), tmp_path / "checkpoint"))
    path = folder / "preprocessor_config.json"
    settings = {key: value for key, value in json.loads(path.read_text()).items() if "pixels" not in key}
    path.write_text(json.dumps({**settings, "size": None, **own}))
    options = [word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", value)]
    # Those of TensorRT too, whose limit of ranked tokens holds by default.
    form = ("--precision", "fp16", "--dialect", "opset20") if not given else ()
    most = ("--budgets", "prune-66.7")
    outcome = run("sinkprune-export", folder, "-o", tmp_path / "out", *options, *form, *most)
    assert outcome.code == 0, outcome.stderr
    said = f"images: up to {tokens} visual tokens ({pixels} pixels). Larger ones are scaled down"
    assert (said in outcome.stderr) == ("max_pixels" not in given)
    manifest = read_bundle(tmp_path / "out").manifest
    assert (manifest.processor["max_pixels"], manifest.most_visual_tokens >= tokens) == (pixels, True)


@pytest.mark.parametrize(("frames", "tokens"), [(2, 1280), (12, 1280), (16, 960), (32, 480), (96, 160)])
@pytest.mark.parametrize("name", ["qwen", "qwen3-vl"])
def test_clips_have_tokens_for_a_robot(
    name: str, frames: int, tokens: int, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint(name), tmp_path / "checkpoint"))
    path = folder / "preprocessor_config.json"
    settings = {key: value for key, value in json.loads(path.read_text()).items() if "pixels" not in key}
    path.write_text(json.dumps({**settings, "size": {"shortest_edge": 3136, "longest_edge": 16777216}}))
    if name == "qwen3-vl":
        video = {"size": {"shortest_edge": 4096, "longest_edge": 25165824}}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    opened = open_source(ExportRequest(str(folder), max_frames=frames))
    opened.weights.close()
    assert opened.processor["video"]["max_pixels"] == tokens * (784 if name == "qwen" else 1024)
