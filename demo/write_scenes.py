"""Write the first test scenes as pictures: `python -m sinkprune.demo.write_scenes FOLDER COUNT`.

Their questions are in `FOLDER/scenes.jsonl`, as `sinkprune-evaluate --task` reads them.
"""

from __future__ import annotations

import json
import sys
from itertools import groupby, islice
from pathlib import Path

from sinkprune.demo.scenes import test_set


def write_scenes(folder: Path, count: int) -> None:
    """`count` pictures `scene-0.png`, ... and `scenes.jsonl` into `folder`."""
    lines = []
    by_picture = groupby(test_set(), key=lambda pair: id(pair[0]))
    for number, (_, group) in enumerate(islice(by_picture, count)):
        for picture, question in group:
            picture.save(folder / f"scene-{number}.png")
            line: dict[str, object] = {
                "id": question.id,
                "image": f"scene-{number}.png",
                "kind": question.kind,
                "question": question.text,
                "answer": question.answers[0],
            }
            if question.options:
                line["options"] = question.options
            lines.append(json.dumps(line) + "\n")
    (folder / "scenes.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    write_scenes(Path(sys.argv[1]), int(sys.argv[2]))
