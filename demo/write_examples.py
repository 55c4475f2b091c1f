"""Write the files that README and docs name: `python -m sinkprune.demo.write_examples FOLDER`.

`kitchen.jpg` is a photo of a cup on a table, `a.jpg` and `b.jpg` two other views of it. `kitchen.jsonl` asks two
questions about each of 16 views, as `sinkprune-evaluate --task` and `sinkprune-calibrate --data` read them.
`clip.mp4` moves over the photo, for two seconds.
"""

from __future__ import annotations

import json
import sys
from fractions import Fraction
from pathlib import Path

from PIL import Image

PHOTO = Path(__file__).parent / "photos" / "coffee.jpg"
VIEWS = 16
QUESTIONS = {"existence": ("Is there a cup on the table?", "yes"), "object": ("What is on the table?", "a cup")}
"""A question and its answer, by kind."""
FRAMES, FPS = 20, 10


def write_examples(folder: Path) -> None:
    """Write the pictures, the questions and the clip into `folder`, which exists."""
    with Image.open(PHOTO) as photo:
        photo.load()
    photo.save(folder / "kitchen.jpg", quality=95)
    view(photo, 2).save(folder / "a.jpg", quality=95)
    view(photo, 13).save(folder / "b.jpg", quality=95)
    (folder / "kitchen").mkdir(exist_ok=True)
    lines = []
    for number in range(VIEWS):
        name = f"kitchen/{number + 1:02d}.jpg"
        view(photo, number).save(folder / name, quality=95)
        for kind, (question, answer) in QUESTIONS.items():
            line = {"id": f"{number + 1}-{kind}", "image": name, "kind": kind, "question": question, "answer": answer}
            lines.append(json.dumps(line) + "\n")
    (folder / "kitchen.jsonl").write_text("".join(lines), encoding="utf-8")
    write_clip(folder / "clip.mp4", [view(photo, number * VIEWS / FRAMES) for number in range(FRAMES)])


def view(photo: Image.Image, place: float) -> Image.Image:
    """Return three quarters of `photo` at a `place` from 0, on its left, to `VIEWS`, on its right."""
    width, height = (3 * side // 4 // 2 * 2 for side in photo.size)
    left, top = round((photo.width - width) * place / VIEWS), (photo.height - height) // 2
    return photo.crop((left, top, left + width, top + height))


def write_clip(path: Path, frames: list[Image.Image]) -> None:
    """Write `frames` of one even size as H.264, `FPS` a second; needs PyAV."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(FPS))
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            picture = av.VideoFrame.from_image(frame)  # type: ignore[no-untyped-call]
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))


if __name__ == "__main__":
    write_examples(Path(sys.argv[1]))
