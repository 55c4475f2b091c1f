"""Tasks for tests: questions about two photos, as a JSONL file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from PIL import Image
from skimage import data

PHOTOS = ("a.png", "b.png")


def write_task(folder: Path, questions: Iterable[tuple[str, str]]) -> Path:
    """Write two photos, a line for each picture and question, and return the file of questions."""
    photo = Image.fromarray(data.coffee()).resize((200, 150))
    photo.save(folder / PHOTOS[0])
    photo.rotate(90).save(folder / PHOTOS[1])
    lines = [{"image": image, "question": question, "answer": "a cup"} for image, question in questions]
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
