"""8-bit pixels to the floats a vision tower takes, as transformers' image processors compute them, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

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
