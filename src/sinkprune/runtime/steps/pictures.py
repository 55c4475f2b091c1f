"""The pictures of a request: images and clips, in files or in memory, and their way to the vision tower."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import Image

from sinkprune.contract.errors import ImageError
from sinkprune.contract.precision import Array
from sinkprune.contract.schedule import VisualLayout
from sinkprune.runtime.families import Family
from sinkprune.runtime.media.frame import Frame, Picture, SampledFrames, UnopenedPicture, Video
from sinkprune.runtime.media.images import read_image, to_rgb

PictureLike = Picture | Array | str | os.PathLike[str] | Video | UnopenedPicture
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


def _picture(source: Picture | Array | Video | UnopenedPicture, family: Family) -> Picture:
    match source:
        case SampledFrames() | Frame():
            return source
        case Video():
            return family.sample_frames(source)
        case UnopenedPicture():
            with source.opened() as media:
                return media if isinstance(media, Image.Image) else family.sample_frames(media)
        case _:
            return to_rgb(source)


@contextmanager
def named_in_errors(source: PictureLike) -> Iterator[None]:
    """Begin the messages of an `ImageError` with the name of `source`, where that is a file or bytes."""
    try:
        yield
    except ImageError as error:
        if isinstance(source, (str, os.PathLike)):
            raise ImageError(f"'{source}': {error}") from error
        if isinstance(source, UnopenedPicture):
            raise ImageError(f"{source.name}: {error}") from error
        raise
