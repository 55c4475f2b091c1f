"""LLaVA-NeXT's pictures: the whole image and its tiles, one group each; unpruned prompts have newline rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from sinkprune.contract.checks import from_json
from sinkprune.contract.errors import ImageError
from sinkprune.contract.manifest import Manifest, Pinpoints, SquareSettings
from sinkprune.contract.precision import Array
from sinkprune.contract.schedule import VisualLayout, grid_boxes
from sinkprune.runtime.families import Fit
from sinkprune.runtime.families.llava import Llava, PixelSize, SquareProcessor

if TYPE_CHECKING:
    from sinkprune.runtime.frames import FrameForm, FramePlan


class TileSettings(SquareSettings):
    """Conversion of an image to several squares."""

    image_grid_pinpoints: Pinpoints


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

    def frame_plans(self, size: PixelSize) -> list[FramePlan]:
        """Return what a call computes of an image of `size`: the whole image, then its tiles; raises `ImageError`."""
        from sinkprune.runtime.frames import Axis, PillowPlan

        side, canvas, resample = self._side, self.canvas(size), self._settings["resample"]
        if not self._square.keeps((side, side)):
            return []
        whole = [(Axis(length, 0, length, side, 0, side),) for length in size]
        tiles = [
            tuple(Axis(length, 0, length, new, place - corner, side) for place in range(0, extent, side))
            for length, new, corner, extent in zip(size, canvas.shown, canvas[2:4], canvas[:2], strict=True)
        ]
        return [PillowPlan(columns, rows, resample) for columns, rows in (whole, tiles)]

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
        across, down = width / size[0], height / size[1]
        if across < down:
            shown = width, min(math.ceil(size[1] * across), height)
        else:
            shown = min(math.ceil(size[0] * down), width), height
        return Canvas(width, height, (width - shown[0]) // 2, (height - shown[1]) // 2, shown)


def unpadded(size: PixelSize, columns: int, rows: int) -> tuple[slice, slice]:
    """Return the rows and columns of a canvas of `columns` x `rows` tokens that show an image of `size`."""
    width, height = size
    if width / height > columns / rows:
        padding = (rows - int(round(height * (columns / width), 7))) // 2
        return slice(padding, rows - padding), slice(0, columns)
    padding = (columns - int(round(width * (rows / height), 7))) // 2
    return slice(0, rows), slice(padding, columns - padding)


class LlavaNext(Llava):
    """The image side of a LLaVA-NeXT bundle."""

    between_rows: str | None = "image_newline"

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest)
        self._tiles = LlavaNextProcessor(manifest.processor, self._tower.image_size)
        self._pinpoints = manifest.processor["image_grid_pinpoints"]

    def fitted(self, fit: Fit) -> None:
        """Return None: the tiles show whole images of any shape."""

    def frame_form(self) -> FrameForm | None:
        return self._square_form(views=max(max(pair) for pair in self._pinpoints) // self._tower.image_size)

    def frame_plans(self, size: PixelSize) -> list[FramePlan]:
        return self._tiles.frame_plans(size)

    def largest(self) -> dict[str, VisualLayout]:
        """Return a layout with the most tiles, and the longest prompt of an image that fills its canvas."""
        layouts = [self._layout((width, height)) for height, width in self._pinpoints]
        most = max(layouts, key=lambda layout: layout.groups)
        return {"image": replace(most, unpruned_rows=max((x.unpruned_rows for x in layouts), key=len))}

    def _pixels(self, image: Image.Image) -> Array:
        return self._tiles(image)

    def _layout(self, size: PixelSize) -> VisualLayout:
        canvas, n = self._tiles.canvas(size), self._tower.tokens
        groups = 1 + canvas.width * canvas.height // self._tower.image_size**2
        # The whole image, and its tiles side by side
        views = [range(n), range(n, groups * n)]
        return self._in_line(size, groups, self._rows(size, canvas), self._boxes(size, canvas), views)

    def _rows(self, size: PixelSize, canvas: Canvas) -> Array:
        """Return the tokens of the whole image, then of the canvas by lines, without padding; -1 ends a line."""
        side, n = self._side, self._tower.tokens
        rows, columns = (length // self._tower.image_size for length in (canvas.height, canvas.width))
        tokens = n + np.arange(rows * columns * n).reshape(rows, columns, side, side)
        raster = tokens.transpose(0, 2, 1, 3).reshape(rows * side, columns * side)
        lines = raster[unpadded(size, columns * side, rows * side)]
        return np.concatenate([np.arange(n), np.pad(lines, ((0, 0), (0, 1)), constant_values=-1).ravel()])

    def _boxes(self, size: PixelSize, canvas: Canvas) -> Array:
        """Return the boxes of all tokens. Those of patches on padding are outside the image."""
        side, length = self._side, self._tower.image_size
        boxes = [grid_boxes((0, 0, *size), side, side)]
        x, y = size[0] / canvas.shown[0], size[1] / canvas.shown[1]
        for top in range(0, canvas.height, length):
            for left in range(0, canvas.width, length):
                corner = ((left - canvas.left) * x, (top - canvas.top) * y)
                boxes.append(grid_boxes((*corner, corner[0] + length * x, corner[1] + length * y), side, side))
        return np.concatenate(boxes)
