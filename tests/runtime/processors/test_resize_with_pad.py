"""LeRobot's squares against PyTorch's `interpolate` and plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sinkprune.contract.checks import SchemaError
from sinkprune.contract.errors import ImageError
from sinkprune.runtime.families.policies import PaddedProcessor, ResizeWithPad

SIDE = 56
SETTINGS: dict[str, Any] = {
    "image_processor_type": "resize_with_pad_torch",
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "resample": 2,
    "pad_size": {"height": SIDE, "width": SIDE},
}
PADDED: dict[str, Any] = {
    **SETTINGS,
    "image_processor_type": "PI0ImageProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "do_pad": True,
    "size": {"max_height": SIDE, "max_width": SIDE},
}
SIZES = [(640, 480), (100, 301), (56, 56), (20, 10), (33, 57), (1, 1), (57, 56), (1000, 30)]


def drawn(size: tuple[int, int]) -> Image.Image:
    pixels = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(pixels)


def expected(image: Image.Image, *, centred: bool) -> np.ndarray[Any, Any]:
    """Floats of 0 to 1, resized by PyTorch, with black around; then -1 to 1."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 255
    ratio = max(image.width / SIDE, image.height / SIDE)
    height, width = int(image.height / ratio), int(image.width / ratio)
    resized = torch.nn.functional.interpolate(pixels, (height, width), mode="bilinear", align_corners=False)
    square = np.zeros((3, SIDE, SIDE), np.float32)
    top, left = ((SIDE - height) // 2, (SIDE - width) // 2) if centred else (SIDE - height, SIDE - width)
    for row in range(height):
        for column in range(width):
            square[:, top + row, left + column] = resized[0, :, row, column]
    return square * 2 - 1


@pytest.mark.parametrize("kind", ["resize_with_pad_torch", "resize_with_pad"])
@pytest.mark.parametrize("size", SIZES)
def test_pixels_are_those_of_pytorch(size: tuple[int, int], kind: str) -> None:
    found = ResizeWithPad({**SETTINGS, "image_processor_type": kind})(drawn(size))
    np.testing.assert_allclose(found, expected(drawn(size), centred=kind == "resize_with_pad_torch"), atol=2e-5)


@pytest.mark.parametrize("size", SIZES)
def test_the_box_is_where_the_square_lies_on_the_picture(size: tuple[int, int]) -> None:
    """The picture's own corners, in shares of the box, are the corners of the pixels that are not bars."""
    processor = ResizeWithPad(SETTINGS)
    left, top, right, bottom = processor.square_box(size)
    white = processor(Image.new("RGB", size, (255, 255, 255)))[0] > 0
    for axis, length, start, end in ((0, size[0], left, right), (1, size[1], top, bottom)):
        places = np.flatnonzero(white.any(axis=axis))
        corners = SIDE * (np.array([0, length]) - start) / (end - start)
        np.testing.assert_allclose(corners, [places[0], places[-1] + 1], atol=1e-9)


@pytest.mark.parametrize("size", [(1, 57), (500, 1), (0, 3)])
def test_pictures_of_which_nothing_is_left_are_rejected(size: tuple[int, int]) -> None:
    """By every call: a policy asks for the box before it resizes."""
    padded = PaddedProcessor(PADDED)
    for processor in (ResizeWithPad(SETTINGS), padded):
        for call in (processor.square_box, lambda size, own=processor: own(Image.new("RGB", size))):
            with pytest.raises(ImageError, match=f"has {size[0]}x{size[1]} pixels, .* is left in a square of 56"):
                call(size)


def test_settings_are_checked() -> None:
    with pytest.raises(SchemaError, match="image_processor_type"):
        ResizeWithPad({**SETTINGS, "image_processor_type": "PI0ImageProcessor"})
