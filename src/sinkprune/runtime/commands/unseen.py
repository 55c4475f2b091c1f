"""A line on stderr about pictures of which the model sees only a part."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.checks.terminal import escaped
from sinkprune.contract.layout import VisualLayout
from sinkprune.runtime.commands import BundleOptions
from sinkprune.runtime.families import load_family
from sinkprune.runtime.media.clip import Picture
from sinkprune.runtime.steps.pictures import layout_of


def warn_unseen(options: BundleOptions, bundle: Bundle, files: Sequence[Path], pictures: Sequence[Picture]) -> None:
    """Print a line for the first image of each size of which the model sees only a part.

    `pictures` are those read from `files`, in the same order. Raises `ImageError` for what the family rejects.
    """
    family = load_family(bundle.manifest, options.fit)
    first: dict[tuple[int, int], tuple[Path, Image.Image]] = {}
    for file, picture in zip(files, pictures, strict=True):
        if isinstance(picture, Image.Image):
            first.setdefault(picture.size, (file, picture))
    for file, picture in first.values():
        layout = layout_of(file, picture, family, bundle.manifest)
        if layout.seen_share < 1:
            # The answer counts, also where stderr takes nothing.
            with suppress(OSError):
                part = _part(layout, picture.size)
                sys.stderr.write(f"{escaped(str(file))}: {part}. --fit pad shows it all (docs/pictures.md).\n")


def _part(layout: VisualLayout, size: tuple[int, int]) -> str:
    """What the model sees of a picture of `size` (width, height), in words."""
    left, top = np.clip(layout.boxes[:, :2].min(axis=0), 0, size)
    right, bottom = np.clip(layout.boxes[:, 2:].max(axis=0), 0, size)
    middle = f"{right - left:.0f}x{bottom - top:.0f} of {size[0]}x{size[1]}"
    return f"the model sees {percent(layout.seen_share)} of the picture (the middle {middle})"


def percent(seen_share: float) -> str:
    """Return a share between 0 and 1, both excluded, in words that are neither 0 % nor 100 %."""
    return f"{min(99, round(100 * seen_share)) or 'less than 1'} %"
