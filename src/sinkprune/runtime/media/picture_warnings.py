"""Warnings about pictures that the model does not see as they are: cropped, smaller, of fewer frames or bits."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from sinkprune.contract.checks import warn_user
from sinkprune.contract.errors import (
    DividedPictureWarning,
    FewerFramesWarning,
    FirstFrameWarning,
    PartlySeenWarning,
    ScaledDownWarning,
)
from sinkprune.contract.schedule import VisualLayout
from sinkprune.runtime.media.images import NEARLY_BLACK, FileFacts, facts_of, read_header, read_image

_CLEARLY_SMALLER = 0.9
"""The scale of each side, and the share of a clip's frames, below which it is worth a warning."""
_ROUNDED = 0.02
"""How far the sides of a seen square may differ in the picture, because resizing rounds to whole pixels."""


class PictureFacts(NamedTuple):
    """What notes say of a picture whose pixels are not held."""

    size: tuple[int, int]
    """[width,height], turned by its EXIF data."""
    of_file: FileFacts = FileFacts()


def picture_facts(image: Image.Image) -> PictureFacts:
    """Return the facts of a decoded picture."""
    return PictureFacts(image.size, facts_of(image))


def file_facts(path: str | os.PathLike[str]) -> FileFacts:
    """Return the facts of an image file, whose pixels are decoded only if they have 16 bits; raises `ImageError`."""
    frames, wide = read_header(path)
    return picture_facts(read_image(path)).of_file if wide else FileFacts(frames)


class PictureWarnings:
    """What a pipeline has warned of. Each size of pictures causes a warning once, and once more if nearly black."""

    def __init__(self) -> None:
        self._warned: set[tuple[type[Warning], tuple[int, int], int]] = set()

    def warn(self, layouts: Sequence[VisualLayout], files: Sequence[FileFacts]) -> None:
        """Warn the user of pictures with these layouts and files: by kinds of `PictureWarning`."""
        for layout, file in zip(layouts, files, strict=True):
            found: list[tuple[type[Warning], int, str]] = [
                (ScaledDownWarning, 0, scaled_down(layout)),
                (FewerFramesWarning, layout.frames_at_rate, fewer_frames(layout)),
            ]
            if layout.seen_share < 1:
                text = f"{seen_part(layout)}. Pipeline.load(..., fit='pad') shows it all (docs/pictures.md)."
                found += [(PartlySeenWarning, 0, text)]
            if file.largest is not None:
                # A bright picture does not speak for a dark one.
                dark = file.largest < NEARLY_BLACK
                found += [(DividedPictureWarning, dark, f"the picture: {divided(file.largest)}")]
            if file.frames > 1:
                found += [(FirstFrameWarning, file.frames, f"the picture: {first_of(file.frames)}")]
            for category, more, text in found:
                if text and (key := (category, layout.size, more)) not in self._warned:
                    # Remembered afterwards: where the user makes it an error, each request raises it.
                    warn_user(text, category)
                    self._warned.add(key)


def seen_part(layout: VisualLayout) -> str:
    """Return a phrase for the part that the model sees of a picture."""
    size = layout.size
    left, top = np.clip(layout.boxes[:, :2].min(axis=0), 0, size)
    right, bottom = np.clip(layout.boxes[:, 2:].max(axis=0), 0, size)
    width, height = right - left, bottom - top
    if math.isclose(width, height, rel_tol=_ROUNDED):
        width = height = min(width, height)
    middle = f"{width:.0f}x{height:.0f} of {size[0]}x{size[1]}"
    return f"the model sees {percent(layout.seen_share)} of the picture (the middle {middle})"


def unseen_notes(layout: VisualLayout) -> list[str]:
    """Return sentences about the parts of a picture or a clip that the model does not see, or sees smaller."""
    part = f"{seen_part(layout)}. --fit pad shows it all (docs/pictures.md)." if layout.seen_share < 1 else ""
    return [text for text in (part, scaled_down(layout), fewer_frames(layout)) if text]


def scaled_down(layout: VisualLayout) -> str:
    """Return sentences about a picture that the model sees clearly smaller than it is; else ""."""
    phrase = smaller_picture(layout)
    fewer = " or fewer --max-frames" if layout.frames_at_rate else ""
    return (
        f"{phrase}. For small things export it with a larger --max-pixels{fewer} (docs/pictures.md)."
        if phrase
        else ""
    )


def smaller_picture(layout: VisualLayout) -> str:
    """Return a phrase for the size at which the model sees a picture, if it is clearly smaller; else ""."""
    if layout.seen_size is None:
        return ""
    (width, height), (seen_width, seen_height) = layout.size, layout.seen_size
    area = math.prod(layout.seen_size)
    # Pictures within the limit are rounded to whole tokens.
    rounded = math.sqrt(area / layout.tokens) / 2
    smaller = any(side - seen > rounded for side, seen in zip(layout.size, layout.seen_size, strict=True))
    if not smaller or area >= _CLEARLY_SMALLER**2 * math.prod(layout.size):
        return ""
    what = "frames" if layout.frames_at_rate else "picture"
    return f"the model sees the {width}x{height} {what} at {seen_width}x{seen_height} pixels, the bundle's limit"


def fewer_frames(layout: VisualLayout) -> str:
    """Return sentences about a clip of which the model sees clearly fewer frames than by its own rate; else ""."""
    frames = len(layout.frame_indices)
    if frames >= _CLEARLY_SMALLER * layout.frames_at_rate:
        return ""
    return (
        f"the model sees {frames} frames of the clip in place of {layout.frames_at_rate}, the bundle's limit. "
        "For short events export it with a larger --max-frames (docs/pictures.md)."
    )


def unseen_warnings(seen_shares: Sequence[float], what: str) -> tuple[str, ...]:
    """Return a warning if the model sees less than whole pictures, by the share of each; `what` counts them."""
    partly = [share for share in seen_shares if share < 1]
    if not partly:
        return ()
    return (
        f"The model sees only a part of the picture in {len(partly)} of {len(seen_shares)} {what} "
        f"({percent(min(partly))} at least). --fit pad shows it all (docs/pictures.md).",
    )


def notes_on(files: Sequence[FileFacts]) -> list[str]:
    """Return sentences about those of the pictures' files that have 16 bits, or more than one frame."""
    notes = [divided(file.largest) for file in files if file.largest is not None]
    return notes + [first_of(file.frames) for file in files if file.frames > 1]


def first_of(frames: int) -> str:
    """Return sentences about a picture whose file has several frames or pages."""
    return f"the model sees the first of {frames} frames. Give frames as files of their own."


def divided(largest: int) -> str:
    """Return sentences about a picture whose 16 bits were scaled to 8, by its `largest` value."""
    return (
        f"16 bits a channel were scaled to 8. The largest value is now {largest} of 255. If that is too dark, scale "
        "the picture to 8 bits yourself."
    )


def percent(seen_share: float) -> str:
    """Return a share between 0 and 1, both excluded, in words that are neither 0 % nor 100 %."""
    return f"{min(99, round(100 * seen_share)) or 'less than 1'} %"
