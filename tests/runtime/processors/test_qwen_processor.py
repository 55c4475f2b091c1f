"""Qwen's processors equal transformers' and torchvision's; tokens, boxes, windows and positions follow the grid."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as of_hypothesis
from hypothesis import strategies as st
from PIL import Image
from transformers import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.vision_utils import get_vision_window_index

from sinkprune import Pipeline
from sinkprune.contract.budgets import Share
from sinkprune.contract.errors import ImageError, PruningError
from sinkprune.export.checkpoint.presets import PRESETS
from sinkprune.export.families import read_family
from sinkprune.runtime.families.qwen_processor import Grid, QwenProcessor, TorchvisionResize, window_index
from sinkprune.runtime.steps.prompt_rows import positions
from support.models.qwen_checkpoints import IMAGE_TOKEN
from support.references.steps import layout_of, patch_grid

SIZES = [(56, 56), (600, 400), (400, 600), (333, 1111), (28, 28), (3, 5), (1, 200), (1000, 5), (1400, 1300)]
QWEN = read_family("preset", PRESETS["qwen2.5-vl-7b"])

sizes = st.tuples(st.integers(1, 4000), st.integers(1, 4000))
limits = st.tuples(st.integers(1, 10**6), st.integers(784, 2 * 10**7)).map(lambda pair: (min(pair), max(784, *pair)))


def settings(least: int = 56 * 56, most: int = 376320) -> dict[str, object]:
    return QWEN.processor({"min_pixels": least, "max_pixels": most})


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("limits", [(3136, 376320), (784, 100352), (200704, 200704)], ids=str)
def test_pixels_and_grid_equal_transformers(
    size: tuple[int, int], limits: tuple[int, int], photo: Image.Image
) -> None:
    image = photo.resize(size)
    reference = Qwen2VLImageProcessorPil(min_pixels=limits[0], max_pixels=limits[1])(image, return_tensors="np")
    processor = QwenProcessor(settings(*limits))
    assert [list(processor.grid(size))] == reference["image_grid_thw"].tolist()
    pixels = processor(image)
    assert pixels.dtype == np.float32
    np.testing.assert_allclose(pixels, reference["pixel_values"], atol=1e-5)


@given(sizes, limits)
def test_no_image_has_more_tokens_than_the_bundle_is_made_for(size: tuple[int, int], pixels: tuple[int, int]) -> None:
    known = settings(*pixels)
    if max(size) > 200 * min(size):
        with pytest.raises(ImageError, match="200:1"):
            QwenProcessor(known).grid(size)
        return
    grid = QwenProcessor(known).grid(size)
    assert (grid.h * 14, grid.w * 14) == smart_resize(size[1], size[0], 28, *pixels)
    assert grid.patches // 4 <= QWEN.tokens_of(known).most


@pytest.mark.parametrize("name", ["qwen", "qwen2-vl"])
@pytest.mark.parametrize("size", [(600, 400), (28, 28), (100, 900)])
def test_boxes_tile_the_image_in_raster_order(
    size: tuple[int, int], name: str, pipeline: Callable[..., Pipeline]
) -> None:
    layout = layout_of(pipeline(name).family, size)
    boxes = layout.boxes
    assert len(boxes) == layout.tokens
    assert boxes[0, :2].tolist() == [0, 0]
    assert boxes[-1, 2:].tolist() == pytest.approx(size)
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    assert areas.sum() == pytest.approx(size[0] * size[1])
    corners = [(top, left) for left, top, _, _ in boxes.tolist()]
    assert corners == sorted(corners)


@pytest.mark.parametrize("name", ["qwen", "qwen2-vl"])
@pytest.mark.parametrize("size", [(600, 400), (28, 28), (100, 900)])
@pytest.mark.parametrize(("before", "after"), [(5, 7), (0, 3)])
def test_positions_equal_transformers_and_dropped_tokens_leave_gaps(
    size: tuple[int, int],
    before: int,
    after: int,
    name: str,
    model: Callable[[str], Any],
    pipeline: Callable[..., Pipeline],
) -> None:
    torch_model, layout = model(name), layout_of(pipeline(name).family, size)
    n, grid = layout.tokens, patch_grid(pipeline(name), Image.new("RGB", size))
    ids = torch.tensor([[7] * before + [IMAGE_TOKEN] * n + [7] * after])
    expected, delta = torch_model.model.get_rope_index(ids, (ids == IMAGE_TOKEN).int(), torch.tensor([list(grid)]))
    found = positions([before, after], [(layout, np.arange(n))])
    assert found.rows.tolist() == expected[:, 0].tolist()
    assert found.next == before + n + after + int(delta)

    kept = np.array([n - 1, *range(0, n, 3)])
    pruned = positions([before, after], [(layout, kept)])
    rows = [*range(before), *(before + kept).tolist(), *range(before + n, before + n + after)]
    assert pruned.rows.tolist() == expected[:, 0, rows].tolist()
    assert pruned.next == found.next


@given(rows=st.integers(1, 40), columns=st.integers(1, 40), share=st.builds(Share, st.integers(1, 99), st.just(100)))
def test_a_smaller_picture_keeps_its_shape(rows: int, columns: int, share: Share) -> None:
    processor = QwenProcessor(settings(most=28**2 * 40**2 * 2, least=28**2)).smaller(share)
    tokens = share.of(rows * columns)
    if tokens == rows * columns:
        with pytest.raises(PruningError, match="cannot be made smaller"):
            processor.grid((28 * columns, 28 * rows))
        return
    grid = processor.grid((28 * columns, 28 * rows))
    found = (grid.h // 2, grid.w // 2)
    assert found[0] * found[1] <= tokens and found[0] <= rows and found[1] <= columns
    # The height is one of the two next to the one that keeps the shape exactly.
    assert abs(found[0] - (tokens * rows / columns) ** 0.5) < 1 or found[0] in (1, tokens)
    # A row or a column more would be too many, or would change the shape.
    assert found[1] == columns or (found[1] + 1) * found[0] > tokens


ANY_SIZE = st.tuples(st.integers(1, 150), st.integers(1, 150))
sides = st.integers(1, 15).map(lambda units: 2 * units)


@given(st.integers(1, 3), sides, sides)
def test_windows_are_those_of_transformers_and_every_patch_finds_back(t: int, h: int, w: int) -> None:
    units, bounds = get_vision_window_index(
        torch.tensor([[t, h, w]]), spatial_merge_size=2, window_size=112, patch_size=14
    )
    patches = (units[:, None] * 4 + torch.arange(4)).flatten().tolist()
    expected = [sorted(patches[start:end]) for start, end in pairwise(bounds.tolist())]
    windows = window_index(Grid(t, h, w), merge=2, side=4)
    assert windows.index.dtype == windows.slot.dtype == np.int64
    assert [sorted(window[window >= 0].tolist()) for window in windows.index] == expected
    assert windows.index.ravel()[windows.slot].tolist() == list(range(t * h * w))


@given(ANY_SIZE, ANY_SIZE)
@example((112, 84), (112, 84))
@example((100, 61), (100, 84))
@example((100, 61), (112, 61))
@example((1, 1), (28, 56))
# Cameras, and shares too fine for single precision
@example((640, 480), (644, 476))
@example((1919, 1081), (616, 336))
@example((3840, 28), (28, 28))
@example((28, 9000), (56, 28))
@of_hypothesis(deadline=None)
def test_any_size_to_any_other_is_resized_as_by_torchvision(size: tuple[int, int], resized: tuple[int, int]) -> None:
    """Noise, whose edges are as steep as edges can be, against what torchvision calls for uint8 on a CPU."""
    pixels = np.random.default_rng(0).choice(np.array([0, 1, 127, 254, 255], np.uint8), (size[1], size[0], 3))
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    expected = torch.nn.functional.interpolate(tensor, resized[::-1], mode="bicubic", antialias=True)
    found = TorchvisionResize(size, resized)(Image.fromarray(pixels))
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, expected[0].permute(1, 2, 0).numpy())
