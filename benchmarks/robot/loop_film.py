"""Draws an arm that moves while its policy thinks: unpruned, pruned, and with a camera that dies.

    sinkprune-export demo/pocket-robot -o robot --max-images 2
    python benchmarks/robot/loop_film.py robot --film loop.gif

The pocket robot takes an action a tick, ten a second, in simulated time. A chunk takes as many ticks as pi0's true
shapes take in int8 on two cores of an AMD EPYC (docs/measurements/peers-pi0.md), if the robot's 8 actions stand for
pi0's 50: six unpruned, and three at prune-80. The third arm's camera dies, and its loop stops at the age of the last
frame.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

from robot_in_time import RATE_HZ, Cell, Tick, played
from sinkprune import Policy
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.files.output_files import check_outputs, write_whole
from sinkprune.demo.robot_table import MOST_STEPS, RobotTable

_SIDE, _GAP, _HEAD, _FOOT = 240, 12, 50, 46
_DIES, _MOST_AGE = 3, 6
"""The tick at which the camera dies, and the ticks after which its last frame is too old."""
_INK, _GREY, _GOOD, _BAD = (20, 20, 24), (120, 120, 120), (0, 120, 60), (190, 30, 30)


class Arm(NamedTuple):
    """One of the arms that are shown."""

    title: str
    cell: Cell
    dies: float = float("inf")


ARMS = (
    Arm("unpruned: a chunk takes 0.6 s", Cell("switch", 600, "none")),
    Arm("prune-80: a chunk takes 0.3 s", Cell("switch", 300, "prune-80")),
    Arm(f"prune-80, the camera dies at {_DIES / RATE_HZ:.1f} s", Cell("switch", 300, "prune-80"), _DIES),
)


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--episode", type=int, default=3)
    parser.add_argument("--film", type=Path, default=Path("loop.gif"))
    options = parser.parse_args(arguments)
    check_outputs([(options.film, (".gif",))], [], [options.bundle])
    frames = film(Policy.load(options.bundle), options.episode)
    data, ms = io.BytesIO(), 1000 // RATE_HZ
    frames[0].save(
        data, "GIF", save_all=True, append_images=frames[1:], duration=[ms] * (len(frames) - 1) + [2500], loop=0
    )
    write_whole(options.film, data.getvalue())
    sys.stdout.write(f"{len(frames)} ticks in {options.film}\n")


def film(policy: Policy, episode: int) -> list[Image.Image]:
    """Return a frame for each tick, until every arm has ended."""
    panels = [list[Image.Image]() for _ in ARMS]
    for arm, own in zip(ARMS, panels, strict=True):
        table, stopped = RobotTable(f"film {episode}"), ""
        own.append(_panel(arm, table, None, ""))
        for number, tick in enumerate(played(policy, table, 1000 * episode, arm.cell, arm.dies), 1):
            if tick.age > _MOST_AGE and number > arm.dies and not table.done:
                stopped = "stopped: stale frame"
            own.append(_panel(arm, table, tick, stopped))
            if stopped:
                break
    last = max(map(len, panels))
    return [_beside([own[min(place, len(own) - 1)] for own in panels]) for place in range(last)]


def _panel(arm: Arm, table: RobotTable, tick: Tick | None, stopped: str) -> Image.Image:
    """Return an arm's picture: its title and instruction, the table, and what it does at which time."""
    panel = Image.new("RGB", (_SIDE, _HEAD + _SIDE + _FOOT), "white")
    panel.paste(table.cameras()[0].resize((_SIDE, _SIDE), Image.Resampling.LANCZOS), (0, _HEAD))
    draw, font = ImageDraw.Draw(panel), ImageFont.load_default(15)
    draw.text((2, 4), arm.title, _INK, ImageFont.load_default(14))
    draw.text((2, 26), table.instruction, _INK, font)
    time = f"{table.steps / RATE_HZ:.1f} s"
    if stopped:
        words, colour = stopped, _BAD
    elif table.succeeded:
        words, colour = "picked it", _GOOD
    elif table.closed or table.steps >= MOST_STEPS:
        words, colour = "did not pick it", _BAD
    elif tick is None:
        words, colour = "", _INK
    else:
        words, colour = ("moves" if tick.acts else "stands still"), (_INK if tick.acts else _BAD)
    draw.text((2, _HEAD + _SIDE + 3), f"{time}   {words}", colour, font)
    thinks = tick is not None and tick.thinks and not stopped and not table.done
    draw.text((2, _HEAD + _SIDE + 24), "computes the next chunk" if thinks else "", _GREY, font)
    return panel


def _beside(panels: Sequence[Image.Image]) -> Image.Image:
    width = sum(panel.width for panel in panels) + _GAP * (len(panels) + 1)
    whole = Image.new("RGB", (width, panels[0].height + 2 * _GAP), "white")
    for place, panel in enumerate(panels):
        whole.paste(panel, (_GAP + place * (_SIDE + _GAP), _GAP))
    return whole


if __name__ == "__main__":
    sys.exit(main())
