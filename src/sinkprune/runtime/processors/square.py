"""Pixels as square towers take them: resized, cropped and normalised as transformers does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from sinkprune.contract.checks import from_json
from sinkprune.contract.errors import BundleError, ImageError
from sinkprune.contract.manifest import SquareSettings
from sinkprune.contract.precision import Array
from sinkprune.runtime.media.images import Fit, fitted_settings

PixelSize = tuple[int, int]
"""Width and height in pixels, as Pillow orders them."""


def pixel_values(pixels: Array, settings: Mapping[str, Any]) -> Array:
    """Return uint8 `pixels` [height,width,3] as fp32, rescaled and normalised by preprocessor_config.json."""
    values = pixels.astype(np.float32)
    if settings["do_rescale"]:
        values = (pixels.astype(np.float64) * settings["rescale_factor"]).astype(np.float32)
    if settings["do_normalize"]:
        mean = np.asarray(settings["image_mean"], np.float32)
        std = np.asarray(settings["image_std"], np.float32)
        values = (values - mean) / std
    return values


def check_settings(settings: Mapping[str, Any], dtype: np.dtype[Any]) -> None:
    """Raise `BundleError` for settings that turn a pixel into a value that is not finite in `dtype`.

    Values are linear in the pixels, so 0 and 255 have the extremes.
    """
    with np.errstate(all="ignore"):
        ends = pixel_values(np.array([[[0] * 3, [255] * 3]], np.uint8), settings).astype(dtype)
    if not np.isfinite(ends).all():
        used = {name: settings[name] for name in ("rescale_factor", "image_mean", "image_std")}
        raise BundleError(
            f"the bundle's `processor` makes pixels of {used} that are not finite in {dtype}. Mend "
            "preprocessor_config.json of the checkpoint and export it again."
        )


# A larger image after resizing is a panorama whose crop shows next to nothing of it.
_MAX_RESIZED_PIXELS = 100_000_000


class SquareProcessor:
    """Resizes, pads and crops images to one size, by the `settings` of preprocessor_config.json."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Check `settings`; raises `SchemaError` if they are malformed."""
        from_json(SquareSettings, settings, "$.processor")
        self._settings = settings

    def __call__(self, image: Image.Image) -> Array:
        """Return [3,height,width] fp32 of an RGB image; raises `ImageError` if it is empty or too long."""
        settings = self._settings
        if 0 in image.size:
            raise ImageError(f"the image has {image.width}x{image.height} pixels, expected at least 1x1.")
        if settings["do_pad"]:
            image = self._padded(image)
        if settings["do_resize"]:
            image = image.resize(self._resized_size(image.size), Image.Resampling(settings["resample"]))
        pixels = np.asarray(image)
        if settings["do_center_crop"]:
            pixels = self._cropped(pixels)
        return np.ascontiguousarray(pixel_values(pixels, settings).transpose(2, 0, 1))

    def fitted(self, fit: Fit, side: int) -> SquareProcessor:
        """Return a processor with these settings that turns pictures into squares of `side` pixels by `fit`."""
        return SquareProcessor(fitted_settings(self._settings, fit, side))

    def source_box(self, size: PixelSize) -> tuple[float, float, float, float]:
        """Return the area of an image of `size` that the model sees: left, top, right, bottom in its pixels.

        Raises `ImageError` if the image is too long.
        """
        width, height = size
        shift_x = shift_y = 0.0
        if self._settings["do_pad"]:
            side = _padded_side(size)
            shift_x, shift_y = (side - width) // 2, (side - height) // 2
            width = height = side
        resized = self._resized_size((width, height)) if self._settings["do_resize"] else (width, height)
        left, top, right, bottom = 0.0, 0.0, float(resized[0]), float(resized[1])
        if self._settings["do_center_crop"]:
            crop = self._settings["crop_size"]
            left, top = (resized[0] - crop["width"]) // 2, (resized[1] - crop["height"]) // 2
            right, bottom = left + crop["width"], top + crop["height"]
        # Multiply first, so that the edges of the picture are exact.
        left, right = (edge * width / resized[0] - shift_x for edge in (left, right))
        top, bottom = (edge * height / resized[1] - shift_y for edge in (top, bottom))
        return left, top, right, bottom

    def _padded(self, image: Image.Image) -> Image.Image:
        side = _padded_side(image.size)
        background = tuple(int(value * 255) for value in self._settings["image_mean"])
        square = Image.new("RGB", (side, side), background)
        square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        return square

    def _resized_size(self, size: PixelSize) -> PixelSize:
        wanted = self._settings["size"]
        if "shortest_edge" not in wanted:
            return wanted["width"], wanted["height"]
        width, height = size
        edge = wanted["shortest_edge"]
        short, long = min(size), max(size)
        resized_long = int(edge * long / short)
        if edge * resized_long > _MAX_RESIZED_PIXELS:
            raise ImageError(
                f"the image has {width}x{height} pixels; with its short side at {edge} as the model wants it, the "
                f"long side would have {resized_long}. Crop it to an aspect ratio below "
                f"{_MAX_RESIZED_PIXELS // edge**2}:1."
            )
        return (edge, resized_long) if width <= height else (resized_long, edge)

    def _cropped(self, pixels: Array) -> Array:
        """Return the central crop. A smaller image is padded with zeros."""
        crop = self._settings["crop_size"]
        height, width = crop["height"], crop["width"]
        missing = (max(0, height - pixels.shape[0]), max(0, width - pixels.shape[1]), 0)
        pixels = np.pad(pixels, [(-(-count // 2), count // 2) for count in missing])
        top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
        return pixels[top : top + height, left : left + width]


def _padded_side(size: PixelSize) -> int:
    """Return the side of the square that an image of `size` is padded to; raises `ImageError`."""
    side = max(size)
    if side**2 > _MAX_RESIZED_PIXELS:
        raise ImageError(
            f"the image has {size[0]}x{size[1]} pixels; padded to a square as the model wants it, it would have "
            f"{side}x{side}. Scale it to at most {int(_MAX_RESIZED_PIXELS**0.5)} pixels a side."
        )
    return side
