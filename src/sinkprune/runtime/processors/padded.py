"""PI0ImageProcessor of transformers, with Pillow and numpy only, number for number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from sinkprune.contract.checks.fields import from_json
from sinkprune.contract.errors import ImageError
from sinkprune.contract.image_settings import PaddedSettings
from sinkprune.contract.precision import Array
from sinkprune.runtime.processors.pixel_values import pixel_values
from sinkprune.runtime.processors.torchvision_resize import PixelSize


class PaddedProcessor:
    """Resizes whole images into a square, and fills its right or its lower part with zeros."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Check `settings`, those of preprocessor_config.json; raises `SchemaError` if they are malformed."""
        from_json(PaddedSettings, settings, "$.processor")
        self._settings, self._side = settings, settings["pad_size"]["height"]

    def __call__(self, image: Image.Image) -> Array:
        """Return [3,side,side] fp32 of an RGB image; raises `ImageError` if nothing of it would be left."""
        size = self.resized(image.size)
        pixels = np.asarray(image.resize(size, Image.Resampling(self._settings["resample"])))
        padded = np.zeros((3, self._side, self._side), np.float32)
        padded[:, : size[1], : size[0]] = pixel_values(pixels, self._settings).transpose(2, 0, 1)
        return padded

    def resized(self, size: PixelSize) -> PixelSize:
        """Return the width and height of an image of `size` within the square; raises `ImageError` without pixels."""
        width, height = size
        scale = min(self._side / max(height, 1), self._side / max(width, 1))
        return checked_size((int(width * scale), int(height * scale)), size, self._side)

    def square_box(self, size: PixelSize) -> tuple[float, float, float, float]:
        """Return the area of the whole square in pixels of an image of `size`: left, top, right, bottom."""
        width, height = self.resized(size)
        return 0.0, 0.0, self._side * size[0] / width, self._side * size[1] / height


def checked_size(resized: PixelSize, size: PixelSize, side: int) -> PixelSize:
    """Return `resized`, what is left of an image of `size` in a square of `side`; raises `ImageError` for nothing."""
    if 0 in resized:
        raise ImageError(
            f"the image has {size[0]}x{size[1]} pixels, of which nothing is left in a square of {side}. Give one "
            "whose sides differ less."
        )
    return resized
