"""The ways to turn pictures into a tower's square (`Fit`): bars around them, and settings of the processor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from PIL import Image

from sinkprune.contract.errors import ImageError
from sinkprune.runtime.families import Fit


def fitted_settings(given: Mapping[str, Any], fit: Fit, side: int) -> dict[str, Any]:
    """Return the `given` settings of a `SquareProcessor`, for squares of `side` pixels by `fit`.

    `crop` keeps the checkpoint's own shortest edge and crop, if it has them. LLaVA's authors trained with `pad`
    (`expand2square` in `llava/mm_utils.py`).
    """
    square, settings = {"height": side, "width": side}, {**given, "do_pad": fit == "pad"}
    if fit != "crop":
        settings |= {"do_resize": True, "size": square, "do_center_crop": False}
    elif not (settings["do_center_crop"] and "shortest_edge" in settings["size"]):
        settings |= {"do_resize": True, "size": {"shortest_edge": side}}
        settings |= {"do_center_crop": True, "crop_size": square}
    return settings


def padded_side(size: tuple[int, int], most: int) -> int:
    """Return the side of the square that an image of `size` is padded to; raises `ImageError` above `most` pixels."""
    side = max(size)
    if side**2 > most:
        raise ImageError(
            f"the image has {size[0]}x{size[1]} pixels; padded to a square as the model wants it, it would have "
            f"{side}x{side}. Scale it to at most {int(most**0.5)} pixels a side."
        )
    return side


def padded(image: Image.Image, side: int, background: tuple[int, int, int]) -> Image.Image:
    """Return `image` in the middle of a square of `side` pixels in the colour `background`."""
    square = Image.new("RGB", (side, side), background)
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square
