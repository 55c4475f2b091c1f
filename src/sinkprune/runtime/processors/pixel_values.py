"""8-bit pixels to the floats a vision tower takes, as transformers' image processors compute them, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sinkprune.contract.errors import BundleError
from sinkprune.contract.precision import Array


def pixel_values(pixels: Array, settings: Mapping[str, Any]) -> Array:
    """[height,width,3] fp32 of uint8 `pixels`, rescaled and normalised as preprocessor_config.json's settings say."""
    values = pixels.astype(np.float32)
    if settings["do_rescale"]:
        values = (pixels.astype(np.float64) * settings["rescale_factor"]).astype(np.float32)
    if settings["do_normalize"]:
        mean = np.asarray(settings["image_mean"], np.float32)
        std = np.asarray(settings["image_std"], np.float32)
        values = (values - mean) / std
    return values


def check_settings(settings: Mapping[str, Any], dtype: np.dtype[Any]) -> None:
    """Refuse settings that make of some pixel what is not finite in `dtype`; raises `BundleError`.

    Between 0 and 255 the values lie on a line, so that its ends tell.
    """
    with np.errstate(all="ignore"):
        ends = pixel_values(np.array([[[0] * 3, [255] * 3]], np.uint8), settings).astype(dtype)
    if not np.isfinite(ends).all():
        used = {name: settings[name] for name in ("rescale_factor", "image_mean", "image_std")}
        raise BundleError(
            f"the bundle's `processor` makes pixels of {used} that are not finite in {dtype}. Mend "
            "preprocessor_config.json of the checkpoint and export it again."
        )
