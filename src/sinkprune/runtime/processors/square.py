"""Pixels as square towers take them: resized, cropped and normalised as transformers does.

Columns first, then rows, each rounded to 8 bits, by weights of 16 bits (PyTorch, UpSampleKernel.cpp,
`_compute_index_ranges_int16_weights`). No maintained library without torch gives these bits: Pillow's weights are
finer, which changes some percent of the values, and OpenCV's bicubic does not antialias.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from sinkprune.contract.checks import from_json
from sinkprune.contract.errors import BundleError, ImageError
from sinkprune.contract.manifest import SquareSettings
from sinkprune.contract.precision import Array
from sinkprune.runtime.media.images import Fit, fitted_settings

PixelSize = tuple[int, int]
"""Width and height in pixels, as Pillow orders them."""

_MOST_PRECISION = 22
# Rows at a time, so that a step's data stays in the cache
_ROWS = 32
_TRANSPOSE = Image.Transpose.TRANSPOSE


class TorchvisionResize:
    """Resizes pictures of one size (width, height) to another."""

    def __init__(self, size: PixelSize, resized: PixelSize) -> None:
        """Compute the weights from `size` to `resized`."""
        self._columns, self._rows = (_weights(*lengths) for lengths in zip(size, resized, strict=True))

    def __call__(self, picture: Image.Image) -> Array:
        """Return [height,width,3] uint8 of an RGB image."""
        columns = _resized(np.asarray(picture.transpose(_TRANSPOSE)), self._columns)
        return _resized(np.asarray(Image.fromarray(columns).transpose(_TRANSPOSE)), self._rows)


class _Weights(NamedTuple):
    """The shares of old rows in each new row."""

    values: Array
    """[new,old] in a type that holds every sum of weighted pixels exactly."""
    starts: Array
    """[new] the first old row with a share."""
    ends: Array
    """[new] the row after the last with a share."""


def _weights(length: int, resized: int) -> _Weights:
    scale = length / resized
    stretch = max(scale, 1.0)
    centers = scale * (np.arange(resized) + 0.5)
    starts = np.maximum((centers - 2 * stretch + 0.5).astype(np.int64), 0)
    ends = np.minimum((centers + 2 * stretch + 0.5).astype(np.int64), length)
    taps = int((ends - starts).max())
    places = starts[:, None] + np.arange(taps)
    shares = np.where(places < ends[:, None], _cubic((places - centers[:, None] + 0.5) * (1 / stretch)), 0)
    shares /= shares.sum(axis=1, keepdims=True)
    precision, most = 0, shares.max()
    while precision < _MOST_PRECISION and int(0.5 + most * 2 ** (precision + 1)) < 2**15:
        precision += 1
    whole = np.trunc(shares * 2**precision + np.copysign(0.5, shares))
    largest_sum = 255 * np.abs(whole).sum(axis=1).max() + 2 ** (precision - 1)
    values = np.zeros((resized, length + taps), np.float32 if largest_sum < 2**24 else np.float64)
    values[np.arange(resized)[:, None], places] = whole / 2**precision
    return _Weights(values[:, :length], starts, ends)


def _cubic(x: Array) -> Array:
    """Keys' cubic convolution with a = -1/2, term by term as PyTorch writes it."""
    x = np.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _resized(pixels: Array, weights: _Weights) -> Array:
    """Return [new,width,3] uint8 of `pixels` [old,width,3] uint8."""
    values, starts, ends = weights
    new, old = values.shape
    if new == old:
        # All weights would be 0 and 1.
        return pixels
    resized = np.empty((new, *pixels.shape[1:]), np.uint8)
    for start in range(0, new, _ROWS):
        end = min(start + _ROWS, new)
        used = slice(starts[start], ends[end - 1])
        sums = np.tensordot(values[start:end, used], pixels[used].astype(values.dtype), axes=1)
        # The cast rounds towards zero, which is down, because clip removes negative values.
        resized[start:end] = np.clip(sums + values.dtype.type(0.5), 0, 255)
    return resized


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
