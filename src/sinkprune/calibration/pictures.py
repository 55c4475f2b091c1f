"""Pictures to measure a tower on: the pictures of a task, image files, and folders of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from sinkprune.calibration.tasks import Item, items_by_picture, load_task
from sinkprune.contract.errors import ImageError
from sinkprune.runtime.commands.picture_notes import note_many_pictures
from sinkprune.runtime.families import Family
from sinkprune.runtime.media.images import read_image
from sinkprune.runtime.media.picture_warnings import PictureFacts, picture_facts

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
"""The suffixes of a folder's picture files."""


class NamedPicture(NamedTuple):
    """A picture that is loaded on demand."""

    name: str
    """A file's path, or the picture's name in its task."""
    load: Callable[[], Image.Image]
    """Loads it, RGB."""
    facts: PictureFacts


def task_pictures(task: str) -> list[NamedPicture]:
    """Return the pictures of a task, each once; raises `TaskError`."""
    groups = items_by_picture(load_task(task, also="a folder of pictures, "))
    return [NamedPicture(item.picture, item.load_image, item.facts) for item, *_ in groups]


def seen_shares(family: Family, items: Sequence[Item]) -> list[float]:
    """Return the share of its picture that the model sees in each question; raises `ImageError`."""
    shares = {own[0].picture: family.layout(own[0].load_image()).seen_share for own in items_by_picture(items)}
    return [shares[item.picture] for item in items]


def note_items(family: Family, items: Sequence[Item]) -> list[str]:
    """Print and return the notes of `note_many_pictures` on the items' pictures; raises what it raises."""
    return note_many_pictures(family, {item.picture: item.facts for item in items})


def folder_pictures(folder: Path) -> list[NamedPicture]:
    """Return the files in `folder` that end in one of `SUFFIXES`, by name.

    All are decoded once. Raises `ImageError` for a file that is no picture, and for a folder without pictures.
    """
    files = _in_folder(folder)
    return [
        NamedPicture(str(file), partial(read_image, file), picture_facts(image))
        for file in files
        for image in [read_image(file)]
    ]


def _in_folder(folder: Path) -> Iterable[Path]:
    try:
        found = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    except OSError as error:
        raise ImageError(f"'{folder}' cannot be read: {error.strerror}. Give another folder of pictures.") from error
    if not found:
        raise ImageError(f"'{folder}' holds no picture, expected files that end in {', '.join(SUFFIXES)}.")
    return found
