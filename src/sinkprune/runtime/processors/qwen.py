"""Qwen2VLImageProcessor and Qwen2VLVideoProcessor of transformers, on Pillow and numpy alone, number for number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from sinkprune.contract.checks.fields import from_json
from sinkprune.contract.errors import ImageError
from sinkprune.contract.image_settings import PatchSettings
from sinkprune.contract.precision import Array
from sinkprune.runtime.media.clip import ClipSize, Shown
from sinkprune.runtime.processors.pixel_values import pixel_values
from sinkprune.runtime.processors.torchvision_resize import TorchvisionResize

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
        """How many patches there are: t * h * w."""
        return self.t * self.h * self.w


class QwenProcessor:
    """Resizes pictures to whole patches and takes them apart, by the `settings` of preprocessor_config.json."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Raises `SchemaError` for settings that are malformed."""
        from_json(PatchSettings, settings, "$.processor")
        self._settings = settings

    def __call__(self, picture: Image.Image | Shown) -> Array:
        """[patches, 3 * temporal_patch_size * patch_size**2] fp32 of an RGB image or the frames of a clip.

        The patches of a merged token stand together, those in raster order, frame after frame. A still picture, and
        the last frame of a clip where one is left over, is shown in every frame of a temporal patch.
        """
        grid, settings = self.grid(picture.size), self._settings
        patch, merge, together = (settings[f"{name}_size"] for name in ("patch", "merge", "temporal_patch"))
        size = (grid.w * patch, grid.h * patch)
        if isinstance(picture, Shown):
            frames = [*map(TorchvisionResize(picture.size[:2], size), picture.frames)]
        else:
            frames = [np.asarray(picture.resize(size, Image.Resampling(settings["resample"])))]
        frames += frames[-1:] * (grid.t * together - len(frames))
        # One by one, because on the way they are of 64 bits.
        values = np.stack([pixel_values(frame, settings) for frame in frames])
        blocks = values.reshape(grid.t, together, grid.h // merge, merge, patch, grid.w // merge, merge, patch, 3)
        return blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(grid.patches, -1)

    def grid(self, size: Size | ClipSize) -> Grid:
        """The patches of an image of `size` (width, height), or of a clip, as it is resized; raises `ImageError`.

        Both sides become multiples of a merged token's, with a pixel count between min_pixels and max_pixels and the
        aspect ratio kept as far as that goes (smart_resize).
        """
        if isinstance(size, ClipSize):
            return self._clip_grid(size, self._settings["video"])
        return self._resized(size, self._settings["min_pixels"], self._settings["max_pixels"])

    def _clip_grid(self, size: ClipSize, limits: Mapping[str, Any]) -> Grid:
        """That of a clip, whose `limits` are of each of its frames."""
        frame = self._resized((size.width, size.height), limits["min_pixels"], limits["max_pixels"])
        return frame._replace(t=-(-size.frames // self._settings["temporal_patch_size"]))

    def _resized(self, size: Size, least: int, most: int, frames: int = 1, counted: int = 1) -> Grid:
        """The grid of one of several `frames`, which have `least` to `most` pixels together, so many `counted`."""
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
        if counted * rows * columns * unit**2 > most:
            shrink = math.sqrt((frames * height * width) / most)
            rows = max(1, math.floor(height / shrink / unit))
            columns = max(1, math.floor(width / shrink / unit))
        elif counted * rows * columns * unit**2 < least:
            grow = math.sqrt(least / (frames * height * width))
            rows, columns = math.ceil(height * grow / unit), math.ceil(width * grow / unit)
        merge = settings["merge_size"]
        return Grid(1, rows * merge, columns * merge)


class Qwen3Processor(QwenProcessor):
    """Qwen2VLImageProcessor for images, and Qwen3VLVideoProcessor for clips.

    Of the settings `video`, `min_pixels` is of all frames of a clip together, `max_pixels` of each.
    """

    def _clip_grid(self, size: ClipSize, limits: Mapping[str, Any]) -> Grid:
        together, unit = (
            self._settings["temporal_patch_size"],
            self._settings["patch_size"] * self._settings["merge_size"],
        )
        width, height, frames = size.width, size.height, max(size.frames, together)
        if 0 < min(width, height) < unit:
            scale = max(unit / height, unit / width)
            width, height = int(width * scale), int(height * scale)
        # Whole temporal patches. The model's own processor rounds their number to the nearest even one, and lets the
        # frames of some odd clips be a quarter larger: no graph is made for that.
        counted = max(frames, round(frames / together) * together)
        frame = self._resized((width, height), limits["min_pixels"], frames * limits["max_pixels"], frames, counted)
        return frame._replace(t=-(-size.frames // together))
