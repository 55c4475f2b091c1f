"""The film of an episode of the pocket robot."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

import robot_film
from sinkprune import demo
from sinkprune.export.command import main as export

ROBOT = Path(demo.__file__).parent / "pocket-robot"


def test_a_film_shows_every_move(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle, film = tmp_path / "robot", tmp_path / "robot.gif"
    assert export([str(ROBOT), "-o", str(bundle), "--max-images", "2", "--budgets", "prune-66.7"]) == 0
    capsys.readouterr()
    assert robot_film.main([str(bundle), "--budget", "prune-66.7", "--film", str(film)]) == 0
    written = capsys.readouterr().out
    with Image.open(film) as drawn:
        assert f"{drawn.n_frames} frames" in written
        assert drawn.n_frames > 5
        shown = [drawn.convert("RGB") for _ in [drawn.seek(0)]]
        drawn.seek(drawn.n_frames - 1)
        assert shown[0].tobytes() != drawn.convert("RGB").tobytes()
