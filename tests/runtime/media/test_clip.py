"""Which frames of a clip are shown, as the model's own processor samples, resizes and cuts them into patches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import Qwen2_5_VLForConditionalGeneration

from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import ImageError, VideoError
from sinkprune.export.families import read_family
from sinkprune.export.presets import PRESETS
from sinkprune.runtime.families.qwen2_5_vl import Qwen25VL
from sinkprune.runtime.media.clip import Clip, ClipSize, Shown, sampled, shown
from sinkprune.runtime.processors.qwen import QwenProcessor
from sinkprune.runtime.steps.prompt_rows import positions
from support.models.clips import LIMITS, frames
from support.models.qwen_checkpoints import VIDEO_TOKEN

QWEN = read_family("preset", PRESETS["qwen2.5-vl-7b"])


@given(st.integers(2, 4000), st.floats(1, 60), st.integers(4, 768), st.floats(0.5, 4))
def test_frames_are_sampled_as_the_models_processor_does(count: int, fps: float, most: int, target: float) -> None:
    """Qwen2VLVideoProcessor.sample_frames; the class itself needs torchvision."""
    most_even = min(most, count) // 2 * 2
    number = min(max(count / fps * target, 4), most_even, count)
    number = int(number // 2) * 2
    expected = torch.arange(0, count, count / number).int().tolist()[:number]
    found = sampled(count, fps, {**LIMITS, "fps": target, "max_frames": most}, 2)
    assert found == expected
    assert len(found) == number


@given(st.integers(1, 40), st.floats(0.1, 60), st.integers(1, 12))
def test_never_are_more_frames_shown_than_the_bundle_is_made_for(count: int, fps: float, most: int) -> None:
    assert 1 <= len(sampled(count, fps, {**LIMITS, "max_frames": most}, 2)) <= most


def test_eight_frames_of_two_a_second_are_shown_as_they_are(photo: Image.Image) -> None:
    clip = shown(Clip(frames(8, (112, 84), photo), fps=2), LIMITS, 2)
    assert clip.size == ClipSize(112, 84, 8, 2.0)
    faster = shown(Clip(frames(16, (112, 84), photo), fps=8), LIMITS, 2)
    assert faster.size == ClipSize(112, 84, 4, 2.0)
    limited = shown(Clip(frames(16, (112, 84), photo), fps=2), {**LIMITS, "max_frames": 6}, 2)
    assert limited.size == ClipSize(112, 84, 6, 0.75)
    assert shown(Clip(frames(1, (112, 84), photo), fps=2), LIMITS, 2).size == ClipSize(112, 84, 1, 2.0)


@pytest.mark.parametrize(
    "size", [(112, 84), (100, 61), (300, 200), (37, 500), (640, 480)], ids=lambda size: f"{size[0]}x{size[1]}"
)
@pytest.mark.parametrize("count", [1, 4, 5])
def test_patches_are_those_of_the_models_processor(count: int, size: tuple[int, int], photo: Image.Image) -> None:
    """uint8 tensors, resized by what torchvision calls for them on a CPU, then cut as the model is given."""
    known = QWEN.processor({"min_pixels": 784, "max_pixels": 50000, "max_frames": 16})
    processor, clip = QwenProcessor(known), Clip(frames(count, size, photo), fps=2)
    taken = shown(clip, {**known["video"], "min_frames": 1}, 2)
    assert taken.size.frames == (count if count < 5 else 4)
    grid = processor.grid(taken.size)
    assert grid == processor.grid(size)._replace(t=-(-taken.size.frames // 2))
    pixels = torch.from_numpy(np.stack([np.asarray(frame) for frame in taken.frames])).permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(pixels, size=(grid.h * 14, grid.w * 14), mode="bicubic", antialias=True)
    mean, std = (torch.tensor(known[f"image_{which}"]).view(1, 3, 1, 1) for which in ("mean", "std"))
    values = (resized / 255 - mean) / std
    values = torch.cat([values, *[values[-1:]] * (len(values) % 2)])
    # frames, rows of tokens, columns of tokens, rows and columns within them, colours, frames within, rows, columns
    expected = values.reshape(grid.t, 2, 3, grid.h // 2, 2, 14, grid.w // 2, 2, 14).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    found = processor(taken)
    assert found.dtype == np.float32
    assert np.abs(found - expected.reshape(grid.patches, -1).numpy()).max() < 1e-5


def test_a_still_clip_is_the_image_in_every_frame(photo: Image.Image) -> None:
    image = photo.resize((112, 112))
    processor = QwenProcessor(QWEN.processor({"min_pixels": 784, "max_frames": 8}) | {"min_pixels": 784})
    processor._settings["video"]["min_pixels"] = 784
    still = processor(shown(Clip([image] * 4, fps=2), LIMITS, 2))
    assert np.abs(still - np.concatenate([processor(image)] * 2)).max() <= 1e-5


@pytest.mark.parametrize(
    ("clip", "said"),
    [
        (Clip([], fps=2), "no frames"),
        (Clip([Image.new("RGB", (20, 20))], fps=0), "0 frames a second"),
        (Clip([Image.new("RGB", (20, 20))], fps=float("nan")), "nan frames a second"),
        (Clip([Image.new("RGB", (20, 20)), Image.new("RGB", (20, 30))], fps=2), "different sizes"),
        (Clip([np.zeros((3, 20, 20), np.uint8)], fps=2), r"expected uint8 \[height,width,3\]"),
    ],
)
def test_clips_that_cannot_be_shown(clip: Clip, said: str) -> None:
    with pytest.raises(ImageError, match=said):
        shown(clip, LIMITS, 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([], None), "None frames a second, expected a number"),
        (([], "2"), "'2' frames a second, expected a number"),
        ((3, 2), "frames are a int, expected images"),
        (("clip.mp4", 2), "frames are a str, expected images"),
    ],
)
def test_what_is_no_clip(arguments: tuple[Any, Any], said: str) -> None:
    with pytest.raises(VideoError, match=said):
        Clip(*arguments)


def test_frames_may_come_from_a_generator_or_in_one_array(photo: Image.Image) -> None:
    pictures = frames(4, (112, 84), photo)
    expected = shown(Clip(pictures, 2), LIMITS, 2)
    array = np.stack([np.asarray(picture) for picture in pictures])
    for given_frames in ((picture for picture in pictures), array):
        assert shown(Clip(given_frames, np.float32(2)), LIMITS, 2) == expected  # type: ignore[arg-type]


def test_positions_of_a_clip_equal_transformers(
    checkpoint: Callable[[str], Path], bundle: Callable[..., Path], photo: Image.Image
) -> None:
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint("qwen"))

    facts = read_bundle(bundle("qwen")).manifest
    tower = replace(facts.vision, tokens_per_second=model.config.vision_config.tokens_per_second)
    settings = QWEN.processor({"min_pixels": 784, "max_frames": 768})
    family = Qwen25VL(replace(facts, vision=tower, processor=settings))
    for fps, shown_frames in ((2.0, 8), (0.75, 6), (1.37, 40), (24.0, 5)):
        clip = Shown([photo.resize((112, 84))] * shown_frames, ClipSize(112, 84, shown_frames, fps))
        layout, grid = family.layout(clip), QwenProcessor(settings).grid(clip.size)
        n = len(layout.unpruned_rows)
        ids = torch.tensor([[7] * 5 + [VIDEO_TOKEN] * n + [7] * 3])
        expected, delta = model.model.get_rope_index(
            ids,
            2 * (ids == VIDEO_TOKEN).int(),
            video_grid_thw=torch.tensor([list(grid)]),
            second_per_grid_ts=torch.tensor([2 / fps]),
        )
        found = positions([5, 3], [(layout, np.arange(n))])
        assert found.rows.tolist() == expected[:, 0].tolist()
        assert found.next == ids.shape[1] + int(delta)
