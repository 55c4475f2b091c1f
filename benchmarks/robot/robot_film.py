"""Draws an episode of the pocket robot as an animated picture, with the tokens that pruning kept.

    sinkprune-export demo/pocket-robot -o robot --max-images 2
    python benchmarks/robot/robot_film.py robot --budget prune-77.8 --film robot.gif

One camera shows the whole table, the other what is around the gripper. The frame before each chunk of actions has
the kept tokens and a legend; the last frame has the outcome.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from sinkprune import ActionReport, Policy
from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.files.output_files import check_outputs, write_whole
from sinkprune.demo.robot_table import CAMERA_NAMES, RobotTable
from sinkprune.runtime.overlay import TokenClass, counts_line, draw_tokens, token_map, with_legend, with_lines

RUN = 4
"""Actions of each chunk that the robot runs before it looks again."""
_LOOKS_MS, _MOVES_MS, _ENDS_MS = 1500, 200, 3000
_SIDE, _GAP = 480, 20
"""Pixels of a camera's view, and between the two."""


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
        frames.append(drawn_frame(table, counts_line(report), report))
        durations.append(_LOOKS_MS)
        for action in report.actions[:RUN]:
            if not table.done:
                table.step(action)
                frames.append(drawn_frame(table, f"action {table.steps}"))
                durations.append(_MOVES_MS)
    frames[-1] = drawn_frame(table, "picked it" if table.succeeded else "did not pick it")
    return of_one_size(frames), [*durations[:-1], _ENDS_MS]


def drawn_frame(table: RobotTable, line: str, report: ActionReport | None = None) -> Image.Image:
    """Return a frame: the instruction, a line, and the cameras next to each other; of a report also its tokens."""
    views = []
    for number, (name, camera) in enumerate(zip(CAMERA_NAMES, table.cameras(), strict=True)):
        shown, classes = camera, list[TokenClass]()
        if report is not None and report.budget != UNPRUNED:
            tokens = token_map(report.method, report.images[number])
            shown, classes = draw_tokens([camera], tokens), [*tokens.classes]
        view = with_lines(shown.resize((_SIDE, _SIDE), Image.Resampling.LANCZOS), [f"camera {name}"])
        views.append(with_legend(view, classes) if classes else view)
    heading = with_lines(Image.new("RGB", (2 * _SIDE + _GAP, 0)), [f"instruction: {table.instruction}", line])
    size = heading.width, heading.height + max(view.height for view in views)
    frame = Image.new("RGB", size, "white")
    frame.paste(heading, (0, 0))
    for number, view in enumerate(views):
        frame.paste(view, (number * (_SIDE + _GAP), heading.height))
    return frame


def of_one_size(frames: Sequence[Image.Image]) -> list[Image.Image]:
    """Return frames as large as the largest, with white below and at the right of the others."""
    size = max(frame.width for frame in frames), max(frame.height for frame in frames)
    found = [Image.new("RGB", size, "white") for _ in frames]
    for whole, frame in zip(found, frames, strict=True):
        whole.paste(frame, (0, 0))
    return found


if __name__ == "__main__":
    sys.exit(main())
