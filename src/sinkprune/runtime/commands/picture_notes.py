"""Notes on stderr about pictures that the model does not see as they are in their files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image

from sinkprune.contract.checks.terminal import escaped
from sinkprune.contract.layout import VisualLayout
from sinkprune.runtime.media.clip import Picture
from sinkprune.runtime.media.images import had_16_bits
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.steps.pictures import layout_of


def note_pictures(pipeline: Pipeline, files: Sequence[Path], pictures: Sequence[Picture]) -> None:
    """Print a note for the first 16-bit image, and for the first image of each size that is cropped.

    `pictures` are those read from `files`, in the same order. Raises `ImageError` for what the family rejects.
    """
    images = [(file, image) for file, image in zip(files, pictures, strict=True) if isinstance(image, Image.Image)]
    for file, image in images:
        if had_16_bits(image):
            _, largest = image.convert("L").getextrema()
            _note(
                file,
                f"16-bit greyscale was divided by 257. Its largest value is now {largest} of 255. If that is too "
                "dark, scale the picture to 8 bits yourself.",
            )
            break
    first: dict[tuple[int, int], tuple[Path, Image.Image]] = {}
    for file, image in images:
        first.setdefault(image.size, (file, image))
    for file, image in first.values():
        layout = layout_of(file, image, pipeline.family, pipeline.bundle.manifest)
        if layout.seen_share < 1:
            _note(file, f"{_seen_part(layout, image.size)}. --fit pad shows it all (docs/pictures.md).")


def _note(file: Path, text: str) -> None:
    # The command has succeeded, also where stderr is closed.
    with suppress(OSError):
        sys.stderr.write(f"{escaped(str(file))}: {text}\n")


def _seen_part(layout: VisualLayout, size: tuple[int, int]) -> str:
    """Return a phrase for the part that the model sees of a picture of `size` (width, height)."""
    left, top = np.clip(layout.boxes[:, :2].min(axis=0), 0, size)
    right, bottom = np.clip(layout.boxes[:, 2:].max(axis=0), 0, size)
    middle = f"{right - left:.0f}x{bottom - top:.0f} of {size[0]}x{size[1]}"
    return f"the model sees {percent(layout.seen_share)} of the picture (the middle {middle})"


def percent(seen_share: float) -> str:
    """Return a share between 0 and 1, both excluded, in words that are neither 0 % nor 100 %."""
    return f"{min(99, round(100 * seen_share)) or 'less than 1'} %"
