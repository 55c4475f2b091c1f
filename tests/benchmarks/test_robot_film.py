"""The film of an episode of the pocket robot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import robot_film
from sinkprune import demo
from sinkprune.export.command import main as export

ROBOT = Path(demo.__file__).parent / "pocket-robot"


def outline(frame: Image.Image) -> int:
    """Count the pixels of the outlines of tokens that reach the last layer."""
    pixels = np.asarray(frame, int)
    return int((np.abs(pixels - (20, 200, 70)).max(axis=2) < 12).sum())


def test_a_film_shows_every_move(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle, film = tmp_path / "robot", tmp_path / "robot.gif"
    assert export([str(ROBOT), "-o", str(bundle), "--max-images", "2", "--budgets", "prune-66.7"]) == 0
    capsys.readouterr()
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
