"""Clips: frames in a list, and checks of all clips."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from PIL import Image

from sinkprune.contract.checks import RealNumber, creation_checks_options, format_value, type_name
from sinkprune.contract.errors import ImageError, UsageError, VideoError
from sinkprune.contract.precision import Array
from sinkprune.runtime.media.images import to_rgb

MOST_SHOWN_PIXELS = 1 << 27
"""The most pixels of all frames of a clip that a model sees: 16 frames of 3840x2160."""

_RATE = RealNumber("rate", 1e-6, 1e6)
"""Frames a second: from one in eleven days to those of the fastest cameras."""


@creation_checks_options
@dataclass(frozen=True, eq=False)
class Clip:
    """Frames in memory, `fps` of them a second. An iterator is read at once.

    Raises `VideoError` for what cannot be iterated, and for an `fps` that is no number from 1e-06 to 1e+06. A request
    checks the frames.
    """

    frames: Sequence[Image.Image | Array]
    fps: float

    def __post_init__(self) -> None:
        if not isinstance(self.frames, Iterable) or isinstance(self.frames, (str, bytes)):
            raise VideoError(
                f"found {type_name(self.frames)} as a clip's frames, expected images. Give a list of them."
            )
        # PyAV's rates are fractions, which Python 3.11 and earlier cannot write with `:.1f`.
        object.__setattr__(self, "fps", check_rate("clip", self.fps))
        object.__setattr__(self, "frames", [*self.frames])

    @property
    def count(self) -> int:
        """The number of frames."""
        return len(self.frames)

    @property
    def times(self) -> None:
        """None: frames in memory have a constant rate."""

    def read(self, indices: Sequence[int]) -> list[Image.Image]:
        """Return the frames at the ascending `indices` as RGB images.

        Raises `ImageError` for a frame that is no picture, and `VideoError` for a number that no frame has.
        """
        check_indices(indices, self.count)
        for number in indices:
            if isinstance(self.frames[number], (str, os.PathLike)):
                raise ImageError(
                    f"found {format_value(str(self.frames[number]))} as a frame of a clip, expected a Pillow image "
                    "or a uint8 [height,width,3] array. Open it with Image.open, or give a VideoFile."
                )
        return collected(to_rgb(self.frames[index]) for index in indices)


def check_rate(kind: str, fps: object) -> float:
    """Return the frames a second of a clip or video, which messages call `kind`; raises `VideoError`."""
    try:
        return _RATE.check(fps)
    except UsageError as error:
        raise VideoError(
            f"the {kind} has {format_value(fps)} frames a second, expected a number from {_RATE.least:g} to "
            f"{_RATE.most:g}, as in Clip(frames, fps=10)."
        ) from error


def check_indices(indices: Sequence[int], count: int) -> None:
    """Raise `VideoError` for numbers that are not ascending, or not those of `count` frames."""
    if any(not 0 <= index < count for index in indices) or any(a >= b for a, b in pairwise(indices)):
        raise VideoError(f"a clip of {count} frames has ascending frame numbers from 0 to {count - 1}. Give these.")


def collected(frames: Iterable[Image.Image]) -> list[Image.Image]:
    """Return all `frames`; raises `VideoError` as soon as they have more than `MOST_SHOWN_PIXELS`."""
    taken: list[Image.Image] = []
    pixels = 0
    for frame in frames:
        pixels += frame.width * frame.height
        if pixels > MOST_SHOWN_PIXELS:
            raise VideoError(
                f"the frames shown of the video have more than {MOST_SHOWN_PIXELS} pixels together; the first "
                f"{len(taken) + 1} have {pixels}. Scale it down, or export with a smaller --max-frames."
            )
        taken.append(frame)
    return taken
