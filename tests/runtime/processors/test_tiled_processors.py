"""LLaVA-NeXT's and InternVL's tiles and frames equal those of transformers; rows, boxes and groups follow them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import LlavaNextImageProcessorPil
from transformers.image_processing_utils import select_best_resolution
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
    GotOcr2ImageProcessorPil,
    get_optimal_tiled_canvas,
)
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava_next.modeling_llava_next import unpad_image

from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.manifest import Manifest
from sinkprune.export.checkpoint.presets import PRESETS
from sinkprune.export.families import read_family
from sinkprune.runtime.families.internvl import InternVL, TilesProcessor, middle_indices
from sinkprune.runtime.families.llava_next import LlavaNext, LlavaNextProcessor
from sinkprune.runtime.media.clip import Clip
from sinkprune.runtime.media.frame import ClipSize, SampledFrames
from support.models.checkpoints import PINPOINTS, SIDE
from support.models.clips import INTERNVL_BUDGETS, frames
from support.models.internvl_checkpoints import COLOURS
from support.references.steps import layout_of

# Square, wide, tall, ragged, smaller than a tile, larger than every canvas, longer than any
SIZES = [(224, 224), (640, 210), (150, 500), (333, 517), (10, 7), (1, 1), (1400, 1301), (1000, 5), (3, 700)]


@pytest.fixture(scope="module")
def manifest(bundle: Callable[..., Path]) -> Manifest:
    return read_bundle(bundle("next")).manifest


@pytest.fixture(scope="module")
def next_family(manifest: Manifest) -> LlavaNext:
    return LlavaNext(manifest)


def their_rows(size: tuple[int, int]) -> list[int]:
    """`pack_image_features` of transformers, on token numbers."""
    side = SIDE // 14
    height, width = select_best_resolution((size[1], size[0]), PINPOINTS)
    rows, columns = height // SIDE, width // SIDE
    tokens = torch.arange(side**2, (1 + rows * columns) * side**2).view(rows, columns, side, side)
    canvas = tokens.permute(0, 2, 1, 3).reshape(1, rows * side, columns * side)
    lines = unpad_image(canvas, (size[1], size[0]))[0].tolist()
    return [*range(side**2), *(token for line in lines for token in [*line, -1])]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("resample", [2, 3])
def test_tiles_of_next_equal_transformers(size: tuple[int, int], resample: int, photo: Image.Image) -> None:
    known = read_family("preset", PRESETS["llava-next-7b"]).processor({"resample": resample})
    image = photo.resize(size)
    square = {"height": 336, "width": 336}
    theirs = LlavaNextImageProcessorPil(size={"shortest_edge": 336}, crop_size=square, resample=resample)
    expected = theirs(image, return_tensors="np")["pixel_values"][0]
    found = LlavaNextProcessor(known, 336)(image)
    assert found.dtype == np.float32
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1e-5


@settings(max_examples=50, deadline=None)
@given(st.tuples(st.integers(1, 3000), st.integers(1, 3000)))
def test_unpruned_rows_are_those_that_transformers_packs(next_family: LlavaNext, size: tuple[int, int]) -> None:
    layout = layout_of(next_family, size)
    assert layout.unpruned_rows.tolist() == their_rows(size)
    assert layout.unpruned_rows.max() < layout.groups * layout.tokens
    assert len(layout.unpruned_rows) <= len(next_family.largest()["image"].unpruned_rows)


@settings(deadline=None)
@given(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), st.permutations(PINPOINTS))
def test_the_canvas_is_the_one_transformers_chooses(
    manifest: Manifest, size: tuple[int, int], pinpoints: list[list[int]]
) -> None:
    canvas = LlavaNextProcessor({**manifest.processor, "image_grid_pinpoints": pinpoints}, SIDE).canvas(size)
    assert (canvas.height, canvas.width) == tuple(select_best_resolution((size[1], size[0]), pinpoints))


PRESET = read_family("preset", PRESETS["internvl3-1b"])
TILE = 84
SIDES = st.integers(1, 3000)
TILES = st.tuples(st.integers(1, 12), st.integers(1, 12)).map(lambda pair: tuple(sorted(pair)))


@pytest.fixture(scope="module")
def internvl(bundle: Callable[..., Path]) -> InternVL:
    return InternVL(read_bundle(bundle("internvl", budgets=INTERNVL_BUDGETS, max_frames=8)).manifest)


@pytest.mark.parametrize("resample", [2, 3])
@pytest.mark.parametrize("size", [(TILE, TILE), (300, 200), (60, 500), (10, 7), (1, 1), (3, 700)], ids=str)
def test_tiles_equal_transformers(size: tuple[int, int], resample: int, photo: Image.Image) -> None:
    """The setting `crop_to_patches` of a checkpoint is not read: InternVLProcessor turns it on for pictures."""
    square, image = {"height": TILE, "width": TILE}, photo.resize(size)
    theirs = GotOcr2ImageProcessorPil(size=square, resample=resample, **COLOURS)
    expected = theirs(image, **InternVLProcessor.images_kwargs, return_tensors="np")["pixel_values"]
    found = TilesProcessor(PRESET.processor({"resample": resample, **COLOURS}), TILE)(image)
    assert (found.dtype, found.shape) == (np.float32, expected.shape)
    assert found.flags.c_contiguous
    assert np.abs(found - expected).max() <= 1e-5


@given(st.tuples(SIDES, SIDES), TILES)
# Of equal ratios the larger grid needs half of its pixels.
@example((633, 633), (1, 12))
@example((634, 634), (1, 12))
def test_the_grid_is_the_one_transformers_chooses(size: tuple[int, int], tiles: tuple[int, int]) -> None:
    processor = TilesProcessor(PRESET.processor({"min_patches": tiles[0], "max_patches": tiles[1]}), 448)
    assert processor.grid(size) == get_optimal_tiled_canvas(size[::-1], (448, 448), *tiles)


@pytest.mark.parametrize("size", [(112, 84), (300, 700), (640, 480)], ids=str)
def test_frames_are_whole_and_resized_as_torchvision_does(size: tuple[int, int], photo: Image.Image) -> None:
    """uint8 tensors, resized by what torchvision calls for them on a CPU."""
    square, grey = {"height": 448, "width": 448}, {"image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    known = PRESET.processor({**COLOURS, "video_processor": {"size": square, **grey}, "max_frames": 4})
    taken = SampledFrames(frames(3, size, photo), ClipSize(*size, 3, 2.0))
    pixels = torch.from_numpy(np.stack([np.asarray(frame) for frame in taken.frames])).permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(pixels, size=(TILE, TILE), mode="bicubic", antialias=True)
    expected = ((resized / 255 - 0.5) / 0.25).numpy()
    found = TilesProcessor(known, TILE).of_clip(taken)
    assert (found.dtype, found.shape) == (np.float32, (3, 3, TILE, TILE))
    assert np.abs(found - expected).max() < 1e-5


@given(st.integers(1, 3000), st.integers(1, 768))
def test_frames_are_sampled_as_transformers_does(count: int, most: int) -> None:
    """InternVLVideoProcessor.sample_frames, whose module needs torchvision. All frames of a shorter clip."""
    number = min(count, most)
    expected = torch.arange(count / number / 2, count, count / number).int().tolist()
    assert middle_indices(count, 30.0, {"max_frames": most}, 1) == expected
    assert count > most or expected == [*range(count)]


def test_frames_of_a_clip_are_numbered_by_text(internvl: InternVL, photo: Image.Image) -> None:
    clip = internvl.sample_frames(Clip(frames(20, (60, 40), photo), fps=5))
    layout = internvl.layout(clip)
    assert layout.texts == ("Frame1: <img>", *(f"</img>\nFrame{number}: <img>" for number in range(2, 9)), "</img>")
    assert (layout.groups, layout.parts, layout.tokens, layout.frames_at_rate) == (8, 8, 36, 20)
    assert layout.frame_indices == (1, 3, 6, 8, 11, 13, 16, 18)
    np.testing.assert_array_equal(layout.boxes[:36], layout.boxes[-36:])
    assert internvl.largest()["clip"].groups == 8


@pytest.mark.parametrize("size", [(300, 200), (200, 700), (90, 80)])
@pytest.mark.parametrize(("name", "unit"), [("next_family", 14), ("internvl", 28)])
def test_a_bright_spot_lies_in_its_tokens_boxes(
    name: str, unit: int, size: tuple[int, int], request: pytest.FixtureRequest
) -> None:
    family, black = request.getfixturevalue(name), Image.new("RGB", size)
    spotted = black.copy()
    spotted.paste((255, 255, 255), (70, 20, 76, 26))
    layout, after, before = family.layout(spotted), family.inputs(spotted), family.inputs(black)
    change = np.abs(after["pixel_values"] - before["pixel_values"])
    assert change.shape[0] == layout.groups
    side = change.shape[-1] // unit
    units = change.reshape(-1, 3, side, unit, side, unit).sum(axis=(1, 3, 5)).reshape(-1)
    for view in layout.views:
        left, top, right, bottom = layout.boxes[view][units[view].argmax()]
        assert left <= 76 and right >= 70 and top <= 26 and bottom >= 20
    assert [*chain(*layout.views)] == [*range(layout.all_tokens)]
