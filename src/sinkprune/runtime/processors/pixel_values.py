"""Rescaling and normalisation of pixels, bit for bit as in transformers' image processors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sinkprune.contract.errors import BundleError
from sinkprune.contract.precision import Array


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
