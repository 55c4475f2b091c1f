"""Writes moments of the pocket robot for `sinkprune-calibrate`: frames of both cameras, instructions and states.

    python benchmarks/robot/write_moments.py moments --tables 100
    sinkprune-calibrate attention robot --data moments/moments.jsonl

The tables are others than those of the episodes that measure success. Each table has a moment for each of two
objects, after up to seven steps of the scripted expert.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from sinkprune.contract.command_line.command import entry_point
from sinkprune.demo.robot_table import RobotTable

MOST_STEPS = 7


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tables", type=int, default=100)
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    lines = [line for number in range(options.tables) for line in moments(options.folder, number)]
    (options.folder / "moments.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    sys.stdout.write(f"{len(lines)} moments of {options.tables} tables in {options.folder}\n")


def moments(folder: Path, number: int) -> list[dict[str, object]]:
    """Write the frames of a table into `folder`, and return a moment for each of two objects."""
    table = RobotTable(f"moment {number}")
    for _ in range(number % (MOST_STEPS + 1)):
        if not table.done:
            table.step(table.plan(1)[0])
    names = []
    for camera, picture in zip(("table", "gripper"), table.cameras(), strict=True):
        names.append(f"{number:04}-{camera}.png")
        picture.save(folder / names[-1])
    others = [each for each in table.objects if each is not table.objects[table.target]]
    wanted = [table.instruction, f"pick the {' '.join(others[0].pair)}"]
    state = [float(value) for value in table.state()]
    return [{"cameras": names, "instruction": words, "state": state} for words in wanted]


if __name__ == "__main__":
    sys.exit(main())
