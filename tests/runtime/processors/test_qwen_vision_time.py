"""Qwen2.5-VL's tower takes time in proportion to the pixels; it and Qwen3-VL's not much more than torch's own."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import Qwen2_5_VLConfig, Qwen3VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from sinkprune import Pipeline
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.presets import PRESETS
from sinkprune.export.source import ExportRequest
from support.references.steps import patch_grid

pytestmark = pytest.mark.slow

# 0.1, 0.4 and 1.2 megapixels
SIZES = [(364, 280), (728, 560), (1260, 952)]


def small_config(preset: str, layers: int, **tower: Any) -> dict[str, Any]:
    """A tower of true width and few blocks, in front of next to nothing."""
    config = copy.deepcopy(PRESETS[preset])
    config["vision_config"] |= {"out_hidden_size": 256, **tower}
    config["text_config"] |= {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": layers}
    config["text_config"] |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    return config


def load(folder: Path, config: dict[str, Any]) -> Pipeline:
    (folder / "config.json").write_text(json.dumps(config))
    export_bundle(
        ExportRequest(str(folder), budgets=("prune-77.8",), random_weights=True, max_pixels=1260 * 952),
        folder / "bundle",
    )
    return Pipeline.load(folder / "bundle", threads=torch.get_num_threads(), check_sums=False)


def best_seconds(runs: Sequence[Callable[[], Any]]) -> list[float]:
    """The best of three of each, in turn, after one that does not count: other work only slows down."""
    best = [math.inf] * len(runs)
    for turn in range(4):
        for number, run in enumerate(runs):
            seconds = seconds_of(run)
            if turn:
                best[number] = min(best[number], seconds)
    return best


def seconds_of(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def tower(pipeline: Pipeline, image: Image.Image) -> Callable[[], Any]:
    """A run of the bundle's vision engine on `image`."""
    backend = pipeline.backend
    inputs = {name: backend.tensor(array) for name, array in pipeline.family.inputs(image).items()}
    return lambda: pipeline.chain.vision(inputs)


def test_windowed_blocks_take_time_in_proportion_to_the_pixels(photo: Image.Image, tmp_path: Path) -> None:
    pipeline = load(tmp_path, small_config("qwen2.5-vl-3b", 4, depth=4, fullatt_block_indexes=[]))
    towers = [tower(pipeline, photo.resize(size)) for size in SIZES]
    pixels = [width * height for width, height in SIZES]
    # Sizes take turns, so that a slow moment is slow for all. By FLOPs, n x n attention would make this 1.7.
    rounds = [[seconds_of(run) / count for run, count in zip(towers, pixels, strict=True)] for _ in range(6)][1:]
    per_pixel = [median(column) for column in zip(*rounds, strict=True)]
    assert max(per_pixel) < 1.3 * min(per_pixel), per_pixel


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl"])
def test_the_tower_is_within_a_fifth_of_torchs(
    name: str, size: tuple[int, int], photo: Image.Image, tmp_path: Path
) -> None:
    if name == "qwen3-vl":
        config = small_config("qwen3-vl-2b", 24, depth=8, deepstack_visual_indexes=[2, 4, 6])
        torchs = Qwen3VLVisionModel._from_config(Qwen3VLConfig.from_dict(config).vision_config)
    else:
        # One full-attention block in eight, as in the real tower
        config = small_config("qwen2.5-vl-3b", 4, depth=8, fullatt_block_indexes=[7])
        vision = Qwen2_5_VLConfig.from_dict(config).vision_config
        torchs = Qwen2_5_VisionTransformerPretrainedModel._from_config(vision)
    torchs = torchs.eval()
    pipeline, image = load(tmp_path, config), photo.resize(size)
    pixels = torch.from_numpy(pipeline.family.inputs(image)["pixel_values"][0])
    grid = torch.tensor([patch_grid(pipeline, image)])
    with torch.no_grad():
        seconds, torch_seconds = best_seconds([tower(pipeline, image), lambda: torchs(pixels, grid_thw=grid)])
    assert seconds < 1.2 * torch_seconds, (seconds, torch_seconds)
