"""How a picture that is not square is brought to the square that a vision tower takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from sinkprune.contract.checks.format_value import format_value
from sinkprune.contract.errors import UsageError

Fit = Literal["crop", "pad", "stretch"]
"""How: `crop` keeps the middle square and loses the rest. `pad` adds bars of the processor's mean colour, so that the
whole picture is a square. `stretch` resizes the whole picture without keeping its aspect ratio."""
FITS: tuple[Fit, ...] = get_args(Fit)


def check_fit(fit: object) -> None:
    """Raise `UsageError` for what is neither one of `FITS` nor None, the checkpoint's own way."""
    if fit is not None and not (isinstance(fit, str) and fit in FITS):
        raise UsageError(
            f"fit is {format_value(fit)}, expected one of {', '.join(FITS)}, or None for the checkpoint's own."
        )


def fitted_settings(settings: Mapping[str, Any], fit: Fit, side: int) -> dict[str, Any]:
    """The `settings` of a processor with another fit, for a tower that takes squares of `side` pixels.

    `crop` keeps the checkpoint's own shortest edge and crop, where it has them. `pad` is what LLaVA's authors trained
    with (`expand2square` in `llava/mm_utils.py`).
    """
    if fit != "crop":
        whole = {"do_resize": True, "size": {"height": side, "width": side}, "do_center_crop": False}
        return {**settings, **whole, "do_pad": fit == "pad"}
    if settings["do_center_crop"] and "shortest_edge" in settings["size"]:
        return {**settings, "do_pad": False}
    crop = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}, "do_center_crop": True}
    return {**settings, **crop, "do_resize": True, "do_pad": False}


def share_within(box: tuple[float, float, float, float], size: tuple[int, int]) -> float:
    """The share of a picture of `size` (width, height) within `box`: left, top, right, bottom in its pixels."""
    left, top, right, bottom = box
    width, height = size
    return (min(right, width) - max(left, 0.0)) / width * ((min(bottom, height) - max(top, 0.0)) / height)
