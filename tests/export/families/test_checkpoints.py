"""Checkpoints of each family as published: sharded, in bfloat16, with names of several transformers versions.

The features of DeepStack reach the first segment, and no export or bundle loses them.
"""

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
from sinkprune.contract.errors import BundleError
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest, open_source
from support.models.manifests import manifest_data, write_data
from support.models.qwen_checkpoints import QwenShape, make_qwen_checkpoint
from support.programs.commands import assert_refused, run, succeed

Checkpoints = Callable[[str], Path]
BUDGETS = {"mha-336": "retain-64", "next": "retain-320", "internvl": "prune-66.7"}
LLAVA = {
    r"^model\.language_model\.": "language_model.model.",
    r"^model\.vision_tower\.": "vision_tower.vision_model.",
    r"^model\.multi_modal_projector\.": "multi_modal_projector.",
    r"^lm_head\.": "language_model.lm_head.",
}
INTERNVL = {**LLAVA, r"^model\.vision_tower\.": "vision_tower."}
NAMINGS: dict[str, tuple[str, dict[str, str]]] = {
    "llava in memory": ("mha-336", {}),
    "llava before 4.52": ("mha-336", LLAVA),
    "internvl in memory": ("internvl", {}),
    "internvl published": ("internvl", INTERNVL),
    "llava-next published": ("next", {**LLAVA, r"^model\.image_newline": "image_newline"}),
    "qwen published": ("qwen", {r"^model\.visual\.": "visual.", r"^model\.language_model\.": "model."}),
    "cosmos3 published": (
        "qwen3-vl",
        {r"^model\.(visual|language_model)\.": "", r"attn\.([qkv])_proj": r"attn.to_\1", "o_proj": "to_out.0"}
        | {r"self_attn\.([qk])_norm": r"self_attn.norm_\1"},
    ),
}
"""A checkpoint, and how it renames what transformers 5 keeps in memory."""


def without_weights(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*.safetensors")))


def tokens(bundle: Path, budget: str, photo: Image.Image) -> list[int]:
    """The token ids of an answer about a small picture."""
    image = photo.resize((300, 200))
    return Pipeline.load(bundle).generate(image, "What is this?", budget=budget, max_new_tokens=12).token_ids


@pytest.mark.parametrize("naming", NAMINGS)
def test_names_of_other_versions(
    naming: str, checkpoint: Checkpoints, bundle: Callable[..., Path], photo: Image.Image, tmp_path: Path
) -> None:
    name, renamed = NAMINGS[naming]
    tensors = AutoModelForImageTextToText.from_pretrained(checkpoint(name)).state_dict()
    for new, old in renamed.items():
        before, tensors = tensors, {re.sub(new, old, key): tensor for key, tensor in tensors.items()}
        assert before.keys() != tensors.keys(), new
    folder = without_weights(checkpoint(name), tmp_path / "checkpoint")
    held = {key: tensor.contiguous() for key, tensor in tensors.items()}
    if naming.startswith("cosmos3"):
        # Tensors of the part that makes videos, and the names of its class.
        held |= {key: torch.zeros(2, 2) for key in ("layers.0.self_attn.add_q_proj.weight", "proj_in.weight")}
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config |= {"model_type": "cosmos3_omni", "architectures": ["Cosmos3ForConditionalGeneration"], "model": {}}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    budget = BUDGETS.get(name, "prune-77.8")
    export_bundle(ExportRequest(str(folder), budgets=(budget,)), tmp_path / "bundle")
    assert tokens(tmp_path / "bundle", budget, photo) == tokens(bundle(name), budget, photo)


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


def test_a_limit_that_is_too_large_for_topk_is_rejected_with_what_fits(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    export = ("sinkprune-export", checkpoint("qwen"), "-o", tmp_path / "out", "--precision", "fp16")
    assert_refused(run(*export, "--max-pixels", 12845056), "16384", "3840", "--max-pixels 6690656")
    assert_refused(run(*export, "--max-pixels", 700), "784 to 700 pixels", "--max-pixels")
    assert list(tmp_path.iterdir()) == []
    succeed(*export, "--max-pixels", 12845056, "--budgets", "prune-88.9")


def with_pixels(folder: Path, **own: Any) -> None:
    """Replace the limits of a checkpoint's pictures."""
    path = folder / "preprocessor_config.json"
    settings = {key: value for key, value in json.loads(path.read_text()).items() if "pixels" not in key}
    path.write_text(json.dumps({**settings, "size": None, **own}))


@pytest.mark.parametrize(
    ("name", "own", "given", "pixels", "tokens"),
    [
        # As published
        ("qwen", {"min_pixels": 3136, "max_pixels": 12845056}, {}, 1280 * 784, 1280),
        ("qwen3-vl", {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}, {}, 1280 * 1024, 1280),
        # A limit of the checkpoint that is lower, and small images that are enlarged to more
        ("qwen", {"max_pixels": 376320}, {}, 376320, 480),
        ("qwen", {"max_pixels": 12845056}, {"min_pixels": 2000 * 784}, 2000 * 784, 2000),
    ],
)
def test_images_have_tokens_for_a_robot_unless_it_asks_for_more(
    name: str,
    own: dict[str, Any],
    given: dict[str, int],
    pixels: int,
    tokens: int,
    copied: Callable[..., Path],
    tmp_path: Path,
) -> None:
    folder = copied(name)
    with_pixels(folder, **own)
    options = [word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", value)]
    # Those of TensorRT too, whose limit of ranked tokens holds by default.
    form = ("--precision", "fp16", "--dialect", "opset20") if not given else ()
    outcome = succeed("sinkprune-export", folder, "-o", tmp_path / "out", *options, *form, "--budgets", "prune-66.7")
    assert f"images: up to {tokens} visual tokens ({pixels} pixels). Larger ones are scaled down" in outcome.stderr
    manifest = read_bundle(tmp_path / "out").manifest
    assert (manifest.processor["max_pixels"], manifest.most_visual_tokens >= tokens) == (pixels, True)


@pytest.mark.parametrize(("frames", "tokens"), [(2, 1280), (16, 960), (96, 160)])
@pytest.mark.parametrize("name", ["qwen", "qwen3-vl"])
def test_clips_have_tokens_for_a_robot(name: str, frames: int, tokens: int, copied: Callable[..., Path]) -> None:
    video = {"size": {"shortest_edge": 4096, "longest_edge": 25165824}}
    folder = copied(name, **({"video_preprocessor_config": video} if name == "qwen3-vl" else {}))
    with_pixels(folder, size={"shortest_edge": 3136, "longest_edge": 16777216})
    opened = open_source(ExportRequest(str(folder), max_frames=frames))
    opened.weights.close()
    assert opened.processor["video"]["max_pixels"] == tokens * (784 if name == "qwen" else 1024)


def test_a_decoder_that_would_be_cut_before_its_features_are_added_is_rejected(tmp_path: Path) -> None:
    make_qwen_checkpoint(tmp_path / "checkpoint", QwenShape(kind="qwen3_vl", num_layers=23))
    outcome = run("sinkprune-export", tmp_path / "checkpoint", "-o", tmp_path / "out", "--budgets", "prune-80")
    assert_refused(outcome, "drops tokens after layer 1", "DeepStack", "No stage may come before layer 2")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("graph", "role", "message"),
    [
        ("decoder_0", "inputs", "'decoder_0' does not take"),
        ("sinkpruner/prune-66.7/sanitizer", "outputs", "kept_deepstack"),
        ("vision", "outputs", "deepstack"),
    ],
)
def test_a_bundle_that_would_lose_the_features_is_rejected(
    graph: str, role: str, message: str, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copytree(bundle("qwen3-vl"), tmp_path / "bundle")
    manifest = manifest_data(tmp_path / "bundle")
    spec = manifest["graphs"][graph]
    spec[role] = [tensor for tensor in spec[role] if "deepstack" not in tensor["name"]]
    write_data(tmp_path / "bundle", manifest)
    with pytest.raises(BundleError, match=message):
        read_bundle(tmp_path / "bundle")
