"""What a request may show a model: images and clips, in files or in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from PIL import Image

from sinkprune.contract.errors import ImageError
from sinkprune.runtime.clip import Clip, Shown
from sinkprune.runtime.families import Family
from sinkprune.runtime.images import read_image, to_rgb
from sinkprune.runtime.video_file import VideoFile

Array = np.ndarray[Any, Any]
PictureLike = Image.Image | Array | str | os.PathLike[str] | Clip | VideoFile | Shown
"""A Pillow image, a uint8 [height,width,3] array, an image file, frames in a list, a video file, or what `decoded`
made of one."""


def decoded(source: Any, family: Family) -> Image.Image | Shown:
    """An RGB image, or the frames of a clip that a model of `family` is shown; raises `ImageError`."""
    if isinstance(source, Shown):
        return source
    if isinstance(source, (Clip, VideoFile)):
        return family.shown(source)
    return read_image(source) if isinstance(source, (str, os.PathLike)) else to_rgb(source)


@contextmanager
def naming(source: PictureLike) -> Iterator[None]:
    """Put the file's name before what is said of an image from a file."""
    try:
        yield
    except ImageError as error:
        if isinstance(source, (str, os.PathLike)):
            raise ImageError(f"'{source}': {error}") from error
        raise
