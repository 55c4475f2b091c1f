"""Write scenes as pictures: `python -m sinkprune.demo.write_scenes FOLDER COUNT [SPLIT [SET]]`.

The scenes are the first COUNT of the split. The default is "test"; use "validation" to calibrate. The set is "scenes"
by default, or "varied-scenes", whose pictures have several resolutions. Their questions are in `FOLDER/scenes.jsonl`,
for `--data` of `sinkprune-evaluate` and `sinkprune-calibrate`.
"""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path

from sinkprune.contract.checks import counted
from sinkprune.contract.command_line.progress import status
from sinkprune.contract.files.output_files import make_folder
from sinkprune.demo.questions import questions_about, varied_questions_about

_SETS = {"scenes": questions_about, "varied-scenes": varied_questions_about}


def write_scenes(folder: Path, count: int, split: str = "test", scenes: str = "scenes") -> None:
    """Write `count` pictures `scene-0.png`, ... of `split`, and `scenes.jsonl`, into `folder`; print how many.

    `scenes` is `scenes` or `varied-scenes`.
    """
    lines = []
    make_folder(folder)
    by_picture = groupby(_SETS[scenes](split, count), key=lambda pair: id(pair[0]))
    with status("drawing") as progress:
        for number, (_, group) in enumerate(by_picture):
            progress("drawing", number, count, "pictures")
            pairs = [*group]
            pairs[0][0].save(folder / f"scene-{number}.png")
            for _, question in pairs:
                line: dict[str, object] = {
                    "id": question.id,
                    "image": f"scene-{number}.png",
                    "kind": question.kind,
                    "question": question.text,
                    "answer": question.answers[0],
                }
                if question.options:
                    line["options"] = question.options
                elif question.choice:
                    line["choice"] = question.choice
                lines.append(json.dumps(line) + "\n")
    data = folder / "scenes.jsonl"
    data.write_text("".join(lines), encoding="utf-8")
    sys.stdout.write(f"{folder}: {counted(count, 'picture')}\n{data}: {counted(len(lines), 'question')}\n")


if __name__ == "__main__":
    write_scenes(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
