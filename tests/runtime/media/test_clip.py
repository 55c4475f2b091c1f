"""Which frames of a clip are shown, as the model's own processor samples, resizes and cuts them into patches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize

from sinkprune import VideoFile
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import ImageError, VideoError
from sinkprune.export.checkpoint.presets import PRESETS
from sinkprune.export.families import read_family
from sinkprune.runtime.families.qwen import Qwen25VL
from sinkprune.runtime.families.qwen_processor import (
    Qwen3Processor,
    QwenProcessor,
    end_to_end_indices,
    evenly_spaced_indices,
    sample_frames,
)
from sinkprune.runtime.media.clip import Clip
from sinkprune.runtime.media.frame import ClipSize, SampledFrames
from support.models.clips import LIMITS, frames
from support.models.video_files import write_video

QWEN, QWEN3 = (read_family("preset", PRESETS[name]) for name in ("qwen2.5-vl-7b", "qwen3-vl-2b"))
HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
PROCESSORS: dict[str, tuple[Any, type[QwenProcessor], int, dict[str, Any]]] = {
    "qwen2.5-vl": (QWEN, QwenProcessor, 14, {"min_pixels": 784, "max_pixels": 50000, "max_frames": 16}),
    "qwen3-vl": (
        QWEN3,
        Qwen3Processor,
        16,
        {**HALVES, "video_processor": {"size": {"shortest_edge": 4096, "longest_edge": 400000}}, "max_frames": 4},
    ),
}
"""Each family's preset, processor, patch size, and settings of a checkpoint."""


@given(st.integers(2, 4000), st.floats(1, 60), st.integers(4, 768), st.floats(0.5, 4))
def test_frames_are_sampled_as_the_processor_of_qwen2_does(count: int, fps: float, most: int, target: float) -> None:
    """Qwen2VLVideoProcessor.sample_frames; the class itself needs torchvision."""
    most_even = min(most, count) // 2 * 2
    number = min(max(count / fps * target, 4), most_even, count)
    number = int(number // 2) * 2
    expected = torch.arange(0, count, count / number).int().tolist()[:number]
    found = evenly_spaced_indices(count, fps, {**LIMITS, "fps": target, "max_frames": most}, 2)
    assert found == expected
    assert len(found) == number


@given(st.integers(1, 4000), st.floats(1, 60), st.integers(2, 768), st.floats(0.5, 4))
def test_frames_are_sampled_as_the_processor_of_qwen3_does(count: int, fps: float, most: int, target: float) -> None:
    limits = SimpleNamespace(fps=target, min_frames=min(4, most), max_frames=most)
    metadata = SimpleNamespace(total_num_frames=count, fps=fps)
    expected = Qwen3VLVideoProcessor.sample_frames(limits, metadata).tolist()
    found = end_to_end_indices(count, fps, {**LIMITS, **vars(limits)}, 2)
    assert found == expected
    assert len(found) <= most


@pytest.mark.parametrize("size", [(112, 84), (100, 61), (300, 200), (37, 500), (640, 480)], ids=str)
@pytest.mark.parametrize("count", [1, 4, 5])
@pytest.mark.parametrize("name", PROCESSORS)
def test_patches_are_those_of_the_models_processor(
    name: str, count: int, size: tuple[int, int], photo: Image.Image
) -> None:
    """uint8 tensors, resized by what torchvision calls for them on a CPU, then cut as both processors cut them."""
    preset, processing, patch, hub = PROCESSORS[name]
    known = preset.processor(hub)
    taken = SampledFrames(frames(count, size, photo), ClipSize(*size, count, 2.0))
    processor = processing(known)
    grid = processor.grid(taken.size)
    pixels = torch.from_numpy(np.stack([np.asarray(frame) for frame in taken.frames])).permute(0, 3, 1, 2)
    whole = (grid.h * patch, grid.w * patch)
    resized = torch.nn.functional.interpolate(pixels, size=whole, mode="bicubic", antialias=True)
    mean, std = (torch.tensor(known[f"image_{which}"]).view(1, 3, 1, 1) for which in ("mean", "std"))
    own, *shape = Qwen3VLVideoProcessor.patchify(None, ((resized / 255 - mean) / std)[None], patch, 2, 2)
    found = processor(taken)
    assert found.dtype == np.float32
    assert tuple(shape) == tuple(grid)
    assert name == "qwen3-vl" or grid == processor.grid(size)._replace(t=grid.t), "as large as an image"
    assert np.abs(found - own[0].numpy()).max() < 1e-5


@given(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), st.integers(2, 16))
def test_frames_are_as_large_as_the_processor_of_qwen3_makes_them(size: tuple[int, int], count: int) -> None:
    """In the longest clip; the frames of shorter ones are no larger, nor are those of an odd number of frames."""
    assume(max(size) <= 150 * min(size))
    video = {"size": {"shortest_edge": 4096, "longest_edge": 25165824}}
    known = QWEN3.processor({**HALVES, "max_pixels": 1 << 24, "video_processor": video, "max_frames": count})
    grid = Qwen3Processor(known).grid(ClipSize(*size, count, 2.0))
    limits = {"min_pixels": 4096, "max_pixels": 25165824 // count * count}
    own = smart_resize(count, size[1], size[0], 2, 32, **limits)
    assert (grid.h * 16, grid.w * 16) == own or (count % 2 and own[0] * own[1] * count > limits["max_pixels"])
    assert grid.h * grid.w // 4 <= known["video"]["most_tokens"]
    one = Qwen3Processor(known).grid(ClipSize(*size, 2, 2.0))
    assert one.h * one.w // 4 <= known["video"]["most_tokens"]


@pytest.mark.parametrize(
    ("given", "fps", "message"),
    [
        *(([], fps, f"the clip has {fps} frames a second, expected") for fps in (None, 0, float("nan"), True)),
        ([], 10**400, "the clip has a number of more than 80 digits"),
        ([], Fraction(10) ** -400, "the clip has 1[0/]*"),
        ("clip.mp4", 2, "found str as a clip's frames, expected images"),
        ([], 2, "no frames"),
        ([Image.new("RGB", (20, 20)), Image.new("RGB", (20, 30))], 2, "different sizes"),
        ([np.zeros((3, 20, 20), np.uint8)], 2, r"expected uint8 \[height,width,3\]"),
        (["a.jpg"], 2, "found 'a.jpg' as a frame of a clip, expected a Pillow image or .* Open it with"),
    ],
)
def test_what_is_no_clip_or_cannot_be_shown(given: Any, fps: Any, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        sample_frames(Clip(given, fps), LIMITS, 2)


def test_positions_of_a_clip_of_a_variable_rate_are_its_times(
    bundle: Callable[..., Path], photo: Image.Image
) -> None:
    facts = read_bundle(bundle("qwen")).manifest
    family = Qwen25VL(replace(facts, processor=QWEN.processor({"min_pixels": 784, "max_frames": 768})))
    seconds = (0.0, 0.4, 2.3, 9.0, 30.0)
    clip = SampledFrames([photo.resize((112, 84))] * 5, ClipSize(112, 84, 5, 0.2), seconds, constant_rate=False)
    each = family._tower.tokens_per_second
    assert sorted({*family.layout(clip).places[0].tolist()}) == [0, int(2.3 * each), int(30 * each)]


def test_numbers_that_no_frame_has_are_refused(photo: Image.Image, tmp_path: Path) -> None:
    given = frames(5, (112, 84), photo)
    for clip in (Clip(given, fps=2), VideoFile(write_video(tmp_path / "clip.mp4", given))):
        assert len(clip.read([1, 4])) == 2
        for indices in ([5], [-1], [3, 1], [2, 2]):
            with pytest.raises(VideoError, match="a clip of 5 frames has ascending frame numbers from 0 to 4"):
                clip.read(indices)
