"""Pixels of LLaVA-NeXT: tiles of the picture, padded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from sinkprune.contract.checks import from_json
from sinkprune.contract.errors import ImageError
from sinkprune.contract.manifest import TileSettings
from sinkprune.contract.precision import Array
from sinkprune.runtime.processors.square import PixelSize, SquareProcessor


class Canvas(NamedTuple):
    """The black canvas that is cut into tiles, and the image's place on it, in pixels."""

    width: int
    height: int
    left: int
    top: int
    shown: PixelSize
    """Width and height of the resized image on the canvas."""


class LlavaNextProcessor:
    """Cuts images into squares of `side` pixels, by the `settings` of preprocessor_config.json."""

    def __init__(self, settings: Mapping[str, Any], side: int) -> None:
        """Check `settings`; raises `SchemaError` if they are malformed."""
        from_json(TileSettings, settings, "$.processor")
        self._settings, self._side = settings, side
        self._square = SquareProcessor(settings)

    def __call__(self, image: Image.Image) -> Array:
        """Return [1+tiles,3,side,side] fp32 of an RGB image: the whole image, then its tiles in raster order."""
        side, resample = self._side, Image.Resampling(self._settings["resample"])
        canvas = self.canvas(image.size)
        shown = Image.new("RGB", (canvas.width, canvas.height))
        shown.paste(image.resize(canvas.shown, resample), (canvas.left, canvas.top))
        corners = ((x, y) for y in range(0, canvas.height, side) for x in range(0, canvas.width, side))
        tiles = [shown.crop((x, y, x + side, y + side)) for x, y in corners]
        return np.stack([self._square(view) for view in (image.resize((side, side), resample), *tiles)])

    def canvas(self, size: PixelSize) -> Canvas:
        """Return the canvas for an image of `size`: it loses fewest pixels, and of equals wastes fewest."""
        if 0 in size:
            raise ImageError(f"the image has {size[0]}x{size[1]} pixels, expected at least 1x1.")

        def merit(pinpoint: tuple[int, int]) -> tuple[int, int]:
            height, width = pinpoint
            scale = min(width / size[0], height / size[1])
            effective = min(int(size[0] * scale) * int(size[1] * scale), size[0] * size[1])
            return effective, effective - width * height

        height, width = max(self._settings["image_grid_pinpoints"], key=merit)
        shown = _fitted(size, width, height)
        return Canvas(width, height, (width - shown[0]) // 2, (height - shown[1]) // 2, shown)


def unpadded(size: PixelSize, columns: int, rows: int) -> tuple[slice, slice]:
    """Return the rows and columns of a canvas of `columns` x `rows` tokens that show an image of `size`."""
    width, height = size
    if width / height > columns / rows:
        padding = (rows - int(round(height * (columns / width), 7))) // 2
        return slice(padding, rows - padding), slice(0, columns)
    padding = (columns - int(round(width * (rows / height), 7))) // 2
    return slice(0, rows), slice(padding, columns - padding)


def _fitted(size: PixelSize, width: int, height: int) -> PixelSize:
    """Return the largest size with the aspect ratio of `size` within `width` x `height`, rounded up."""
    across, down = width / size[0], height / size[1]
    if across < down:
        return width, min(math.ceil(size[1] * across), height)
    return min(math.ceil(size[0] * down), width), height
