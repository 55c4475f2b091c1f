"""Programs about the pocket robot: its film, its success, tokens on bars, and moments for its commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import kept_on_bars
import robot_film
import robot_success
import write_moments
from sinkprune import Policy, demo
from sinkprune.demo.robot_table import RobotTable
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pocket robot with the plans of all these programs."""
    path = tmp_path_factory.mktemp("robot") / "bundle"
    request = ExportRequest(
        str(Path(demo.__file__).parent / "pocket-robot"), ("prune-66.7",), ("sinkpruner", "downsample"), max_images=2
    )
    export_bundle(request, path)
    return path


def outline(frame: Image.Image) -> int:
    """Count the pixels of the outlines of tokens that reach the last layer."""
    pixels = np.asarray(frame, int)
    return int((np.abs(pixels - (20, 200, 70)).max(axis=2) < 12).sum())


def test_a_film_shows_every_move(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    film = tmp_path / "robot.gif"
    assert robot_film.main([str(bundle), "--budget", "prune-66.7", "--film", str(film)]) == 0
    written = capsys.readouterr().out
    with Image.open(film) as drawn:
        assert f"{drawn.n_frames} frames" in written
        assert drawn.n_frames > 5
        looks, moves, ends = (
            drawn.convert("RGB") for number in (0, 1, drawn.n_frames - 1) for _ in [drawn.seek(number)]
        )
    # Outlines of tokens and the legend are where there are tokens only.
    assert outline(looks) > 1000 and outline(moves) == outline(ends) == 0
    below = (0, looks.height - 100, looks.width, looks.height)
    assert len(looks.crop(below).getcolors()) > 20 and len(moves.crop(below).getcolors()) == 1
    assert moves.tobytes() != ends.tobytes()


SIDE = 12
"""Tokens of a row of the robot's pictures, each of 8 pixels of 96."""


def test_tokens_on_bars_are_counted(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kept_on_bars.main([str(bundle), "--tables", "2"]) == 0
    rows = [row for row in capsys.readouterr().out.splitlines()[2:] if "`sinkpruner`" in row]
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


def test_the_robot_picks_unpruned_and_pruned(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "success.json"
    assert robot_success.main([str(bundle), "--episodes", "6", "--json", str(written)]) == 0
    report = json.loads(written.read_text(encoding="utf-8"))
    success = {(row["method"], row["budget"]): row["success"] for row in report["rows"]}
    assert [*success] == [("sinkpruner", "none"), ("sinkpruner", "prune-66.7"), ("downsample", "prune-66.7")]
    assert (report["episodes"], report["interrupted"]) == (6, None)
    assert success["sinkpruner", "none"] >= 5 / 6
    assert all(0 <= row["ci95"][0] <= row["success"] <= row["ci95"][1] <= 1 for row in report["rows"])
    assert all(row["chunk_ms"] > 0 and row["chunks_an_episode"] >= 1 for row in report["rows"])
    assert [row["versus_first"] is None for row in report["rows"]] == [True, True, False]
    versus = report["rows"][2]["versus_first"]
    paired = success["downsample", "prune-66.7"] - success["sinkpruner", "prune-66.7"]
    assert versus["mean"] == pytest.approx(paired)
    assert versus["ci95"][0] <= paired <= versus["ci95"][1]
    assert "| `sinkpruner` | `none` |" in capsys.readouterr().out


def test_moments_are_of_other_tables_with_two_instructions_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "moments"
    assert write_moments.main([str(folder), "--tables", "4"]) == 0
    assert capsys.readouterr().out == f"8 moments of 4 tables in {folder}\n"
    lines = [json.loads(line) for line in (folder / "moments.jsonl").read_text().splitlines()]
    assert len(lines) == 8
    for number in range(4):
        first, second = lines[2 * number : 2 * number + 2]
        table = RobotTable(f"moment {number}")
        for _ in range(number):
            table.step(table.plan(1)[0])
        assert first["cameras"] == second["cameras"] and first["state"] == second["state"]
        assert first["state"] == pytest.approx(table.state().tolist())
        assert first["instruction"] == table.instruction != second["instruction"]
        assert second["instruction"] in {f"pick the {' '.join(one.pair)}" for one in table.objects}
        for name, picture in zip(first["cameras"], table.cameras(), strict=True):
            with Image.open(folder / name) as written:
                np.testing.assert_array_equal(np.asarray(written), np.asarray(picture))
