"""LLaVA-NeXT's image processor equals transformers' own, and rows, boxes and groups follow its tiles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import LlavaNextImageProcessorPil
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_next.modeling_llava_next import unpad_image

from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.manifest import Manifest
from sinkprune.export.checkpoint.presets import PRESETS
from sinkprune.export.families import read_family
from sinkprune.runtime.families.llava_next import LlavaNext, LlavaNextProcessor
from support.models.checkpoints import PINPOINTS, SIDE
from support.references.steps import layout_of

# Square, wide, tall, ragged, smaller than a tile, larger than every canvas, longer than any
SIZES = [(224, 224), (640, 210), (150, 500), (333, 517), (10, 7), (1, 1), (1400, 1301), (1000, 5), (3, 700)]


@pytest.fixture(scope="module")
def manifest(bundle: Callable[..., Path]) -> Manifest:
    return read_bundle(bundle("next")).manifest


@pytest.fixture(scope="module")
def family(manifest: Manifest) -> LlavaNext:
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
def test_tiles_equal_transformers(size: tuple[int, int], resample: int, photo: Image.Image) -> None:
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
def test_unpruned_rows_are_those_that_transformers_packs(family: LlavaNext, size: tuple[int, int]) -> None:
    layout = layout_of(family, size)
    assert layout.unpruned_rows.tolist() == their_rows(size)
    assert layout.unpruned_rows.max() < layout.groups * layout.tokens
    assert len(layout.unpruned_rows) <= len(family.largest()["image"].unpruned_rows)


@settings(deadline=None)
@given(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), st.permutations(PINPOINTS))
def test_the_canvas_is_the_one_transformers_chooses(
    manifest: Manifest, size: tuple[int, int], pinpoints: list[list[int]]
) -> None:
    canvas = LlavaNextProcessor({**manifest.processor, "image_grid_pinpoints": pinpoints}, SIDE).canvas(size)
    assert (canvas.height, canvas.width) == tuple(select_best_resolution((size[1], size[0]), pinpoints))


def test_a_bright_spot_lies_in_its_tokens_box(family: LlavaNext) -> None:
    black = Image.new("RGB", (300, 200))
    spotted = black.copy()
    spotted.paste((255, 255, 255), (250, 20, 256, 26))
    layout, after, before = family.layout(spotted), family.inputs(spotted), family.inputs(black)
    change = after["pixel_values"] - before["pixel_values"]
    patches = np.abs(change).reshape(-1, 3, 8, 14, 8, 14).sum(axis=(1, 3, 5)).reshape(-1)
    for view in layout.views:
        left, top, right, bottom = layout.boxes[view][patches[view].argmax()]
        assert left <= 256
        assert right >= 250
        assert top <= 26
        assert bottom >= 20
