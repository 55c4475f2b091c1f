"""The program that counts kept tokens on the bars of frames that are not square."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import kept_on_bars
from sinkprune import Policy, demo
from sinkprune.export.command import main as export

ROBOT = Path(demo.__file__).parent / "pocket-robot"
SIDE = 12
"""Tokens of a row of the robot's pictures, each of 8 pixels of 96."""


def test_tokens_on_bars_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tmp_path / "robot"
    assert export([str(ROBOT), "-o", str(bundle), "--max-images", "2", "--budgets", "prune-66.7"]) == 0
    capsys.readouterr()
    assert kept_on_bars.main([str(bundle), "--tables", "2"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    # Of 12 rows of tokens, the first 72 pixels cover 9, and 54 pixels cover 7, one in part.
    for row, shape, share in zip(rows, ("4:3", "16:9"), (3 / 12, 5 / 12), strict=True):
        figures = [float(one) for one in re.findall(r"([\d.]+) %", row)]
        assert row.startswith(f"| {shape} | `sinkpruner` | `prune-66.7` | ") and len(figures) == 3
        assert figures[0] == pytest.approx(100 * share, abs=0.05)
        assert all(0 <= one <= 100 for one in figures)
    policy = Policy.load(bundle)
    for width, height, covered in ((96, 72, 9), (96, 54, 7), (54, 96, 7)):
        report = policy.act([Image.new("RGB", (width, height)), None], "go", [0.5, 0.5], steps=1)
        bars = kept_on_bars.bar_tokens(report.images[0]).reshape(SIDE, SIDE)
        across = bars if width > height else bars.T
        rows_on_bars = [number for number in range(SIDE) if across[number].all()]
        assert rows_on_bars == [*range(covered, SIDE)]
        assert np.count_nonzero(bars) == SIDE * len(rows_on_bars)
