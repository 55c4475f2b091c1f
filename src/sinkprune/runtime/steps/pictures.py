"""The pictures of a request: images and clips, in files or in memory, and their way to the vision tower."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from sinkprune.contract.checks import format_value, warn_user
from sinkprune.contract.errors import ImageError, UsageError
from sinkprune.contract.precision import Array
from sinkprune.contract.schedule import VisualLayout
from sinkprune.runtime.families import Family
from sinkprune.runtime.media.frame import Frame, Picture, SampledFrames, UnopenedVideo, Video, is_tensor
from sinkprune.runtime.media.images import ImageBytes, read_image, to_rgb

PictureLike = Picture | Array | str | os.PathLike[str] | Video | ImageBytes | UnopenedVideo
"""A Pillow image, a uint8 [height,width,3] array or a `Frame`, an image file or its bytes, frames in a list, a video
file or its bytes, or a result of `decoded`. Values of 16 bits are scaled to 8 bits."""


def decoded(source: PictureLike, family: Family) -> Picture:
    """Return an RGB image, or the frames of a clip that a model of `family` sees.

    Raises `ImageError`, also for a picture that the family rejects; of a file or bytes, the message has its name.
    Raises `OSError` without room for the bytes of a video.
    """
    picture = pixels_of(source, family)
    layout_of(picture, source, family)
    return picture


def pixels_of(source: PictureLike, family: Family) -> Picture:
    """Return what `decoded` does, before the family has checked it."""
    if isinstance(source, (str, os.PathLike)):
        # With its name in all messages.
        return read_image(source)
    with named_in_errors(source):
        return _picture(source, family)


def layout_of(picture: Picture, source: PictureLike, family: Family) -> VisualLayout:
    """Return the visual tokens of the `picture` that `source` is; raises `ImageError` with the name of `source`."""
    with named_in_errors(source):
        return family.layout(picture)


def _picture(source: Picture | Array | Video | ImageBytes | UnopenedVideo, family: Family) -> Picture:
    match source:
        case SampledFrames() | Frame():
            return source
        case Video():
            return family.sample_frames(source)
        case UnopenedVideo():
            with source.opened() as video:
                return family.sample_frames(video)
        case ImageBytes():
            return source.decoded()
        case _:
            return to_rgb(source)


def check_order(order: object) -> str:
    """Return the order of an array's channels; raises `UsageError` for anything but "rgb" and "bgr"."""
    if not isinstance(order, str) or order not in ("rgb", "bgr"):
        raise UsageError(
            f"order is {format_value(order)}, expected 'rgb' or 'bgr', the order of an array's channels."
        )
    return order


def ordered(given: Iterable[PictureLike], order: object) -> tuple[PictureLike, ...]:
    """Return the `given` pictures in RGB order; channels of arrays and tensors are in `order`, "rgb" or "bgr".

    Tensors of other libraries become arrays in host memory, and a `Frame` on a GPU. Raises `ImageError` for those
    that are elsewhere, or are no frames.

    Raises `UsageError` for another order. Warns (`UserWarning`) where it says nothing, as no picture is an array.
    """
    order, pictures = check_order(order), tuple(given)
    if order == "bgr":
        from sinkprune.runtime.media.clip import Clip

        frames = [frame for source in pictures for frame in (source.frames if isinstance(source, Clip) else [source])]
        if not any(isinstance(frame, np.ndarray) or is_tensor(frame) for frame in frames):
            warn_user(
                "order changed nothing, because no picture is an array. Files and Pillow images have an order of "
                "their own: leave it out."
            )
    return tuple(_with_order(source, order) for source in pictures)


def in_rgb(array: Array, order: str) -> Array:
    """Return a view of the array [height,width,3], whose channels are in `order`, with channels in RGB order."""
    return array[..., ::-1] if order == "bgr" else array


def _with_order(source: PictureLike, order: str) -> PictureLike:
    """Return `source` in RGB order, where it is an array, or a clip of arrays, with channels in `order`."""
    if isinstance(source, np.ndarray) and source.ndim == 3:
        return in_rgb(source, order)
    if is_tensor(source):
        from sinkprune.runtime.device.dlpack import frame_of

        return frame_of(source, bgr=order == "bgr")
    if order == "rgb":
        return source
    from sinkprune.runtime.media.clip import Clip

    if isinstance(source, Clip):
        return Clip([_with_order(frame, order) for frame in source.frames], source.fps)  # type: ignore[misc]
    return source


@contextmanager
def named_in_errors(source: PictureLike) -> Iterator[None]:
    """Begin the messages of an `ImageError` with the name of `source`, where that is a file or bytes."""
    try:
        yield
    except ImageError as error:
        if isinstance(source, (str, os.PathLike)):
            raise ImageError(f"'{source}': {error}") from error
        if isinstance(source, (ImageBytes, UnopenedVideo)):
            raise ImageError(f"{source.name}: {error}") from error
        raise
