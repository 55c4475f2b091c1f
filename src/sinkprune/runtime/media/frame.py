"""What models see: images, frames as their owner holds them (arrays, and tensors of other libraries in host memory or
on a GPU), and the frames of clips."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from PIL import Image

from sinkprune.contract.errors import ImageError
from sinkprune.contract.precision import Array


@dataclass(frozen=True, eq=False)
class Frame:
    """A frame uint8 [height,width,3] that is prepared where the vision tower runs."""

    pixels: Any
    """An array, pixel after pixel, or a tensor on a GPU with `__dlpack__` or `__cuda_array_interface__`."""
    bgr: bool = False
    """Whether the channels are in OpenCV's order."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        height, width, _ = shape_of(self.pixels)
        return width, height

    @property
    def on_host(self) -> bool:
        """Whether the pixels are in host memory."""
        return isinstance(self.pixels, np.ndarray)

    @classmethod
    def of_array(cls, array: Array) -> Frame:
        """Return a copy of an array in RGB order; of a reversed view in BGR order, as its pixels lie in memory."""
        bgr = array.strides[2] < 0
        # A camera may write its next frame into the array before the tower runs.
        return cls(np.array(array[..., ::-1] if bgr else array, order="C"), bgr)

    def rgb_bytes(self) -> bytes:
        """Return the bytes of an array in RGB order."""
        return (self.pixels[..., ::-1] if self.bgr else self.pixels).tobytes()


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


class UnopenedPicture(ABC):
    """A picture that is opened when it is needed: the bytes of an image file or of a video file."""

    name: str
    """Where it is from. Messages of errors begin with it."""

    @abstractmethod
    def opened(self) -> AbstractContextManager[Image.Image | Video]:
        """Yield the RGB image or the video; raises `ImageError`.

        For videos raises `VideoError`, also for what follows, and `OSError` without room for the file.
        """


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


def as_image(picture: Image.Image | Frame) -> Image.Image:
    """Return a picture as a Pillow image; raises `ImageError` for a frame on a GPU."""
    if not isinstance(picture, Frame):
        return picture
    if not picture.on_host:
        raise ImageError(
            "found a frame on the GPU, which this backend or command cannot read. Copy it to the host (frame.cpu(), "
            "frame.get()), or load the model with a backend that prepares frames of this size on the GPU, as "
            "docs/pictures.md lists."
        )
    return Image.fromarray(picture.pixels[..., ::-1] if picture.bgr else picture.pixels)


def shape_of(pixels: Any) -> tuple[int, ...]:
    """Return the shape of an array or a tensor of any library."""
    shape = getattr(pixels, "shape", None)
    return tuple(map(int, pixels.__cuda_array_interface__["shape"] if shape is None else shape))


def is_tensor(source: object) -> bool:
    """Return whether `source` is a tensor of another library that numpy or a GPU can read."""
    readable = hasattr(source, "__dlpack__") or hasattr(source, "__cuda_array_interface__")
    return readable and not isinstance(source, (np.ndarray, np.generic))
