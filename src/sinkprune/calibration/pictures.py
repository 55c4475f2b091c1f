"""Pictures to measure a tower on: those of a task, or image files and folders of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from sinkprune.calibration.tasks import load_task
from sinkprune.contract.errors import ImageError
from sinkprune.runtime.media.images import read_image

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
"""The endings of the files that are taken from a folder."""


class NamedPicture(NamedTuple):
    """A picture that is loaded when it is needed."""

    name: str
    """A file's path, or what its task calls it."""
    load: Callable[[], Image.Image]
    """Loads it, RGB."""


def task_pictures(task: str) -> list[NamedPicture]:
    """The pictures of a task, each once; raises `TaskError`."""
    by_picture = groupby(load_task(task), key=lambda item: item.picture)
    return [NamedPicture(name, next(items).load_image) for name, items in by_picture]


def file_pictures(paths: Sequence[Path]) -> list[NamedPicture]:
    """Image files, and of folders the files in them that have one of `SUFFIXES`, by name; all are read once.

    Raises `ImageError` for what is no picture, and for a folder without one.
    """
    files = [file for path in paths for file in ([path] if not path.is_dir() else _in_folder(path))]
    for file in files:
        read_image(file)
    return [NamedPicture(str(file), partial(read_image, file)) for file in files]


def _in_folder(folder: Path) -> Iterable[Path]:
    try:
        found = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    except OSError as error:
        raise ImageError(f"'{folder}' cannot be read: {error.strerror}. Give another folder of pictures.") from error
    if not found:
        raise ImageError(f"'{folder}' holds no picture, expected files that end in {', '.join(SUFFIXES)}.")
    return found
