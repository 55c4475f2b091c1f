"""The questions about pictures that a schedule is measured with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from sinkprune.calibration.tasks import Item, items_by_picture
from sinkprune.runtime.media.images import read_image

PICTURES = 8
"""Pictures whose attention is measured; a plan's share of it differs little between pictures."""


class PictureQuestion(NamedTuple):
    """A picture and a question about it."""

    image: Image.Image
    question: str


def questions_to_measure(
    items: Sequence[Item], images: Sequence[Path], prompt: str
) -> list[tuple[str, PictureQuestion]]:
    """Return one question about each picture of `items`, else of the files `images`, else of drawn scenes.

    The first has the median length. Before each is the name of its picture's file, "" for a scene. `prompt` is the
    question about files and scenes. Raises `ImageError`.
    """
    if items:
        chosen = [group[0] for group in items_by_picture(items)[:PICTURES]]
        found = [(item.picture, PictureQuestion(item.load_image(), item.question.prompt)) for item in chosen]
    elif images:
        found = [(str(path), PictureQuestion(read_image(path), prompt)) for path in images]
    else:
        from sinkprune.demo.scenes import make_scene

        scenes = [make_scene("validation", number)[1] for number in range(PICTURES)]
        found = [("", PictureQuestion(scene, prompt)) for scene in scenes]
    median = sorted(range(len(found)), key=lambda number: len(found[number][1].question))[len(found) // 2]
    return [found[median], *found[:median], *found[median + 1 :]]
