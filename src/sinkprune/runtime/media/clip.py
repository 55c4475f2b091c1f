"""Clips: frames in a list or a video file."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol, runtime_checkable

from PIL import Image

from sinkprune.contract.checks import RealNumber, creation_checks_options, format_value, type_name
from sinkprune.contract.errors import ImageError, UsageError, VideoError
from sinkprune.contract.precision import Array
from sinkprune.runtime.media.frame import Frame
from sinkprune.runtime.media.images import to_rgb

MOST_SHOWN_PIXELS = 1 << 27
"""The most pixels of all frames of a clip that a model sees: 16 frames of 3840x2160."""

_RATE = RealNumber("rate", 1e-6, 1e6)
"""Frames a second: from one in eleven days to those of the fastest cameras."""


class ClipSize(NamedTuple):
    """The facts about a clip that determine its tokens and their positions."""

    width: int
    height: int
    frames: int
    """The number of frames that the model sees."""
    fps: float
    """How many of these frames show one second."""


@runtime_checkable
class Video(Protocol):
    """A source of frames: a `Clip` in memory, or a `VideoFile`."""

    @property
    def count(self) -> int:
        """The number of frames."""

    @property
    def fps(self) -> float:
        """The number of frames a second, on average."""

    @property
    def times(self) -> Sequence[float] | None:
        """The seconds of each frame after the first; None for frames of a constant rate."""

    def read(self, indices: Sequence[int]) -> list[Image.Image]:
        """Return the frames at the ascending `indices` as RGB images; raises `VideoError`."""


class UnopenedVideo(ABC):
    """A video that is opened when its frames are needed, such as the bytes of a file."""

    name: str
    """Where it is from. Messages of errors begin with it."""

    @abstractmethod
    def opened(self) -> AbstractContextManager[Video]:
        """Yield the video; raises `VideoError`, also for what follows, and `OSError` without room for the file."""


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


@dataclass(frozen=True)
class SampledFrames:
    """The frames of a clip that a model sees, of one size."""

    frames: list[Image.Image]
    size: ClipSize
    seconds: tuple[float, ...] = ()
    """The time of each of them after the video's first frame."""
    at_rate: int = 1
    """How many frames the model's rate takes of the video, without the bundle's limit."""
    indices: tuple[int, ...] = ()
    """The number of each of them in the video."""
    constant_rate: bool = True
    """Whether the video has a constant rate."""


Picture = Image.Image | Frame | SampledFrames
"""The visual input of a model: an RGB image, a frame as its owner holds it, or the frames of a clip."""


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
