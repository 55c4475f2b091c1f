"""Write the files that the README and docs name: `python -m sinkprune.demo.example_files FOLDER`.

The files are `kitchen.jpg`, a photo of a cup; `kitchen.jsonl`, questions about it; `cup.json`, a JSON
schema for answers about it; `clip.mp4`, a camera move over it;
`frames/`, all frames of the clip; `a.jpg` and `b.jpg`, its first and last frame; `photos/`, three photos.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from PIL import Image

_PHOTOS = Path(__file__).parent / "photos"
_FRAMES, _FPS = 20, 10
_STEP = 8
"""Pixels by which the camera moves to the right between frames."""
_QUESTIONS: tuple[dict[str, Any], ...] = (
    {"question": "Is there a cup on the table?", "answer": "yes", "kind": "existence"},
    {"question": "Is there a fork on the table?", "answer": "no", "kind": "existence"},
    {"question": "What colour is the saucer?", "answer": ["red", "brown"], "kind": "colour"},
    {"question": "What lies on the saucer?", "options": ["a fork", "a spoon"], "answer": "a spoon", "kind": "choice"},
)
_SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "white", "brown"]}, "full": {"type": "boolean"}},
    "required": ["colour", "full"],
    "additionalProperties": False,
}


def write_example_files(folder: Path) -> None:
    """Write the files into `folder`, which must exist, and replace files of the same names."""
    kitchen = _PHOTOS / "coffee.jpg"
    shutil.copyfile(kitchen, folder / "kitchen.jpg")
    lines = [json.dumps({"image": "kitchen.jpg", **question}) + "\n" for question in _QUESTIONS]
    (folder / "kitchen.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "cup.json").write_text(json.dumps(_SCHEMA, indent=1) + "\n", encoding="utf-8")
    (folder / "photos").mkdir(exist_ok=True)
    for name in ("astronaut.jpg", "chelsea.jpg", "coffee.jpg"):
        shutil.copyfile(_PHOTOS / name, folder / "photos" / name)
    with Image.open(kitchen) as image:
        side = image.height
        frames = [image.crop((_STEP * i, 0, _STEP * i + side, side)) for i in range(_FRAMES)]
    (folder / "frames").mkdir(exist_ok=True)
    for number, frame in enumerate(frames):
        frame.save(folder / "frames" / f"{number:02d}.jpg")
    frames[0].save(folder / "a.jpg")
    frames[-1].save(folder / "b.jpg")
    _write_clip(folder / "clip.mp4", frames)


def _write_clip(path: Path, frames: Sequence[Image.Image]) -> None:
    # PyAV's annotations leave functions untyped.
    av: Any = import_module("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=_FPS)
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode(None))


if __name__ == "__main__":
    write_example_files(Path(sys.argv[1]))
