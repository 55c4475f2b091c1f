"""What a request may show a model: images and clips, in files or in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from sinkprune.contract.errors import ImageError
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.precision import DTYPES, Array
from sinkprune.runtime.clip import Clip, Picture, Shown
from sinkprune.runtime.families import Family, Seen
from sinkprune.runtime.images import read_image, to_rgb
from sinkprune.runtime.video_file import VideoFile

PictureLike = Picture | Array | str | os.PathLike[str] | Clip | VideoFile
"""A Pillow image, a uint8 [height,width,3] array, an image file, frames in a list, a video file, or what `decoded`
made of one. Greyscale of 16 bits is divided by 257."""


def decoded(source: PictureLike, family: Family) -> Picture:
    """An RGB image, or the frames of a clip that a model of `family` is shown; raises `ImageError`."""
    if isinstance(source, Shown):
        return source
    if isinstance(source, (Clip, VideoFile)):
        return family.shown(source)
    return read_image(source) if isinstance(source, (str, os.PathLike)) else to_rgb(source)


def see(source: PictureLike, picture: Picture, family: Family, manifest: Manifest) -> Seen:
    """`picture`, which came from `source`, as the tower takes it, floats in the bundle's precision.

    Raises `ImageError` for what the family refuses, and for more tokens than the bundle's graphs take.
    """
    with _naming(source):
        inputs, layout = family.see(picture)
        most = manifest.most_visual_tokens
        if layout.tokens > most:
            raise ImageError(
                f"the image has {picture.size[0]}x{picture.size[1]} pixels, which make {layout.tokens} visual "
                f"tokens; this bundle's graphs take up to {most}. Scale it down, or export again with a larger "
                "--max-pixels."
            )
    dtype = DTYPES[manifest.precision]
    return Seen(
        {
            name: array.astype(dtype, copy=False) if np.issubdtype(array.dtype, np.floating) else array
            for name, array in inputs.items()
        },
        layout,
    )


@contextmanager
def _naming(source: PictureLike) -> Iterator[None]:
    """Put the file's name before what is said of an image from a file."""
    try:
        yield
    except ImageError as error:
        if isinstance(source, (str, os.PathLike)):
            raise ImageError(f"'{source}': {error}") from error
        raise
