"""Clips made of a photo, and how they are sampled."""

from __future__ import annotations

from typing import Any

from PIL import Image

VIDEO_BUDGETS = (
    "prune-80",
    "prune-66.7",
    "prune-80+per-frame",
    "prune-80+no-sanitizer",
    "prune-88.9+per-frame+raster",
)
INTERNVL_BUDGETS = (
    "prune-66.7",
    "prune-77.8+compact",
    "prune-80+raster",
    "prune-88.9+keep-outliers+visual-keys",
    "prune-80+no-sanitizer",
)
"""Frames of InternVL's clips are sanitised apart."""
LIMITS: dict[str, Any] = {"fps": 2.0, "min_frames": 4, "max_frames": 768}


def frames(count: int, size: tuple[int, int], photo: Image.Image) -> list[Image.Image]:
    """A camera that moves to the right."""
    return [photo.crop((10 * i, 0, 10 * i + 400, 400)).resize(size) for i in range(count)]
