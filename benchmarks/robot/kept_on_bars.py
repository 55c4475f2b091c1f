"""Measures how many kept tokens lie wholly on the bars of frames that are not square, by shape, method and budget.

    sinkprune-export demo/pocket-robot -o robot --max-images 2
    python benchmarks/robot/kept_on_bars.py robot --tables 100

Frames are the middle of the pocket robot's pictures, at the width of a square one. Bars fill the rest of the square.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from sinkprune import Kept, Policy
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.precision import Array
from sinkprune.demo.robot_table import RobotTable

SHAPES = ((4, 3), (16, 9))


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tables", type=int, default=100)
    options = parser.parse_args(arguments)
    policy = Policy.load(options.bundle, backend="ort-cpu")
    sys.stdout.write("| frames | method | budget | all tokens | into the decoder | in its last layer |\n")
    sys.stdout.write("| --- | --- | --- | --- | --- | --- |\n")
    for shape in SHAPES:
        for method, plans in policy.bundle.manifest.plans.items():
            for budget in plans:
                shares = " | ".join(
                    f"{100 * one:.1f} %" for one in on_bars(policy, shape, method, budget, options.tables)
                )
                sys.stdout.write(f"| {shape[0]}:{shape[1]} | `{method}` | `{budget}` | {shares} |\n")


def on_bars(
    policy: Policy, shape: tuple[int, int], method: str, budget: str, tables: int
) -> tuple[float, float, float]:
    """Return the shares of tokens on bars: of all, of those into the decoder, and of those in its last layer."""
    found, every = Counter[str](), Counter[str]()
    for number in range(tables):
        table = RobotTable(f"bars {number}")
        cameras = [cropped(picture, shape) for picture in table.cameras()]
        report = policy.act(cameras, table.instruction, table.state(), method=method, budget=budget, seed=1, steps=1)
        for kept in report.images:
            bars = bar_tokens(kept)
            first = kept.index.ravel()
            last = first[kept.after_stage[max(kept.after_stage)]] if kept.after_stage else first
            for name, tokens in (("all", np.arange(len(bars))), ("first", first), ("last", last)):
                found[name] += int(bars[tokens].sum())
                every[name] += len(tokens)
    return found["all"] / every["all"], found["first"] / every["first"], found["last"] / every["last"]


def bar_tokens(kept: Kept) -> Array:
    """Return [N] bool: the tokens of a picture whose area has nothing of it."""
    (width, height), (left, top, right, bottom) = kept.layout.size, kept.layout.boxes.T
    bars: Array = (right <= 0) | (bottom <= 0) | (left >= width) | (top >= height)
    return bars


def cropped(picture: Image.Image, shape: tuple[int, int]) -> Image.Image:
    """Return the middle of a square picture, of its width, with the sides' ratio `shape`."""
    height = round(picture.width * shape[1] / shape[0])
    top = (picture.height - height) // 2
    return picture.crop((0, top, picture.width, top + height))


if __name__ == "__main__":
    sys.exit(main())
