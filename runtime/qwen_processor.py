"""Qwen2VLImageProcessor of transformers, on Pillow and numpy alone, number for number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from sinkprune.errors import ImageError
from sinkprune.runtime.pixel_values import pixel_values

# The model's own limit (smart_resize).
_MAX_ASPECT_RATIO = 200

Size = tuple[int, int]


class Grid(NamedTuple):
    """How many patches a picture has along time, height and width."""

    t: int
    h: int
    w: int

    @property
    def patches(self) -> int:
        """All of them."""
        return self.t * self.h * self.w


class QwenProcessor:
    """`settings` are those of preprocessor_config.json."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings

    def __call__(self, image: Image.Image) -> np.ndarray[Any, Any]:
        """[patches, 3 * temporal_patch_size * patch_size**2] fp32 of an RGB image.

        The patches of a merged token stand together, those in raster order. A still picture is shown in every frame
        of a temporal patch.
        """
        grid, settings = self.grid(image.size), self._settings
        patch, merge, frames = (settings[f"{name}_size"] for name in ("patch", "merge", "temporal_patch"))
        size = (grid.w * patch, grid.h * patch)
        pixels = np.asarray(image.resize(size, Image.Resampling(settings["resample"])))
        values = pixel_values(pixels, settings)
        blocks = values.reshape(grid.h // merge, merge, patch, grid.w // merge, merge, patch, 3)
        patches = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(grid.patches, 3, 1, patch * patch)
        return np.broadcast_to(patches, (grid.patches, 3, frames, patch * patch)).reshape(grid.patches, -1)

    def grid(self, size: Size) -> Grid:
        """The patches of an image of `size` (width, height), as it is resized; raises `ImageError`.

        Both sides become multiples of a merged token's, with a pixel count between min_pixels and max_pixels and the
        aspect ratio kept as far as that goes (smart_resize).
        """
        width, height = size
        if 0 in size:
            raise ImageError(f"the image has {width}x{height} pixels, expected at least 1x1.")
        if max(size) / min(size) > _MAX_ASPECT_RATIO:
            raise ImageError(
                f"the image has {width}x{height} pixels; the model takes aspect ratios up to {_MAX_ASPECT_RATIO}:1. "
                "Crop it."
            )
        settings, patch = self._settings, self._settings["patch_size"]
        unit = patch * settings["merge_size"]
        rows, columns = round(height / unit), round(width / unit)
        if rows * columns * unit**2 > settings["max_pixels"]:
            shrink = math.sqrt((height * width) / settings["max_pixels"])
            rows = max(1, math.floor(height / shrink / unit))
            columns = max(1, math.floor(width / shrink / unit))
        elif rows * columns * unit**2 < settings["min_pixels"]:
            grow = math.sqrt(settings["min_pixels"] / (height * width))
            rows, columns = math.ceil(height * grow / unit), math.ceil(width * grow / unit)
        merge = settings["merge_size"]
        return Grid(1, rows * merge, columns * merge)
