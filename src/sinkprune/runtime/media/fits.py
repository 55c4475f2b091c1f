"""Ways to turn a picture that is not square into the square that a vision tower takes."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping
from typing import Any, Literal, get_args

from sinkprune.contract.checks.format_value import format_value
from sinkprune.contract.errors import UsageError

Fit = Literal["crop", "pad", "stretch"]
"""`crop` keeps the middle square and loses the rest. `pad` adds bars of the processor's mean colour around the whole
picture. `stretch` resizes the whole picture without keeping its aspect ratio."""
FITS: tuple[Fit, ...] = get_args(Fit)


def add_fit_option(parser: ArgumentParser) -> None:
    """Add `--fit`, one of `FITS`, to the parser of a command that runs pictures."""
    parser.add_argument(
        "--fit",
        choices=FITS,
        help="how a picture becomes the model's square: crop loses the sides, pad adds bars, stretch changes the "
        "aspect ratio (default: the checkpoint's own)",
    )


def check_fit(fit: object) -> None:
    """Raise `UsageError` if `fit` is neither one of `FITS` nor None, the checkpoint's own way."""
    if fit is not None and not (isinstance(fit, str) and fit in FITS):
        raise UsageError(
            f"fit is {format_value(fit)}, expected one of {', '.join(FITS)}, or None for the checkpoint's own."
        )


def fitted_settings(settings: Mapping[str, Any], fit: Fit, side: int) -> dict[str, Any]:
    """Return a processor's `settings` with another fit, for a tower that takes squares of `side` pixels.

    `crop` keeps the checkpoint's own shortest edge and crop, if it has them. LLaVA's authors trained with `pad`
    (`expand2square` in `llava/mm_utils.py`).
    """
    if fit != "crop":
        whole = {"do_resize": True, "size": {"height": side, "width": side}, "do_center_crop": False}
        return {**settings, **whole, "do_pad": fit == "pad"}
    if settings["do_center_crop"] and "shortest_edge" in settings["size"]:
        return {**settings, "do_pad": False}
    crop = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}, "do_center_crop": True}
    return {**settings, **crop, "do_resize": True, "do_pad": False}


def share_within(box: tuple[float, float, float, float], size: tuple[int, int]) -> float:
    """Return the share of a picture of `size` (width, height) in `box`: left, top, right, bottom in its pixels."""
    left, top, right, bottom = box
    width, height = size
    return (min(right, width) - max(left, 0.0)) / width * ((min(bottom, height) - max(top, 0.0)) / height)
