"""Tasks: questions about pictures to evaluate a bundle on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from sinkprune.contract.errors import TaskError
from sinkprune.contract.questions import Question

SCENES = "scenes"
"""The name of the task that comes along: the project's own test set."""

_GREY = (128, 128, 128)


@dataclass(frozen=True)
class Item:
    """A question of a task and the picture it is about."""

    question: Question
    picture: str
    """Names the picture: items that share it ask about the same one."""
    load_image: Callable[[], Image.Image]
    """Loads the picture, RGB, when it is needed: a task may have thousands."""


def load_task(name: str, limit: int | None = None) -> list[Item]:
    """The first `limit` items of a task: `scenes`, the project's own test set, or a JSONL file.

    Every item is checked, its picture too; a file's lines behind the limit are not read. Raises `TaskError`.
    """
    return list(itertools.islice(_open(name), limit))


def blinded(item: Item) -> Item:
    """The same question about a uniformly grey picture of the same size: what is still right was not seen."""
    return Item(item.question, item.picture, lambda: Image.new("RGB", item.load_image().size, _GREY))


def _open(name: str) -> Iterator[Item]:
    if name == SCENES:
        from sinkprune.calibration.tasks.scenes import read_scenes

        return read_scenes()
    if Path(name).suffix.lower() == ".jsonl":
        from sinkprune.calibration.tasks.jsonl import read_jsonl

        return read_jsonl(Path(name))
    raise TaskError(f"unknown task '{name}'. Give '{SCENES}', or a file of questions that ends in .jsonl.")
