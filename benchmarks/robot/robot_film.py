"""Draws an episode of the pocket robot as an animated picture, with the tokens that pruning kept.

    sinkprune-export demo/pocket-robot -o robot --max-images 2
    python benchmarks/robot/robot_film.py robot --budget prune-77.8 --film robot.gif

The upper camera shows the whole table, the lower one what is around the gripper. The frame before each chunk of
actions has the kept tokens; `docs/pictures.md` explains the colours.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from sinkprune import Policy, overlay
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.files.output_files import check_outputs, write_whole
from sinkprune.demo.robot_table import RobotTable

RUN = 4
"""Actions of each chunk that the robot runs before it looks again."""
_LOOKS_MS, _MOVES_MS, _ENDS_MS = 900, 200, 2000


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--budget", default="prune-77.8")
    parser.add_argument("--episode", type=int, default=0)
    parser.add_argument("--film", type=Path, default=Path("robot.gif"))
    options = parser.parse_args(arguments)
    check_outputs([(options.film, (".gif",))], [], [options.bundle])
    table = RobotTable(f"film {options.episode}")
    frames, durations = film(Policy.load(options.bundle), table, options.budget)
    data = io.BytesIO()
    frames[0].save(data, "GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0)
    write_whole(options.film, data.getvalue())
    kept = f"{len(frames)} frames in {options.film}"
    sys.stdout.write(f"{table.instruction}: {'picked' if table.succeeded else 'not picked'}; {kept}\n")


def film(policy: Policy, table: RobotTable, budget: str) -> tuple[list[Image.Image], list[int]]:
    """Return the frames of an episode, and how many milliseconds each is shown."""
    frames, durations = [], []
    while not table.done:
        report = policy.act(table.cameras(), table.instruction, table.state(), budget=budget, seed=table.steps)
        looked = overlay(report, list(table.cameras()))
        looked = looked.resize((looked.width // 2, looked.height // 2))
        frames.append(looked)
        durations.append(_LOOKS_MS)
        for action in report.actions[:RUN]:
            if not table.done:
                table.step(action)
                frames.append(_moved(looked, table.cameras()))
                durations.append(_MOVES_MS)
    return frames, [*durations[:-1], _ENDS_MS]


def _moved(looked: Image.Image, pictures: Sequence[Image.Image]) -> Image.Image:
    """Return the drawing `looked` of cameras above each other, with other pictures in the places of theirs."""
    found, height = looked.copy(), looked.height // len(pictures)
    for place, picture in enumerate(pictures):
        side = min(looked.width, height)
        found.paste(picture.resize((side, side), Image.Resampling.NEAREST), (0, place * height))
    return found


if __name__ == "__main__":
    sys.exit(main())
