"""`--fit` on the command line, and the line about pictures that the model sees only in part."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from support.programs.commands import run

Bundles = Callable[..., Path]
OPTIONS = ("--prompt", "What is this?", "--max-new-tokens", 2)
WIDE = (
    "the model sees 56 % of the picture (the middle 720x720 of 1280x720). --fit pad shows it all (docs/pictures.md)."
)
TALL = "the model sees 50 % of the picture (the middle 60x60 of 60x120). --fit pad shows it all (docs/pictures.md)."


@pytest.fixture
def files(photo: Image.Image, tmp_path: Path) -> dict[str, Path]:
    """A picture of each shape, by its name."""
    sizes = {"wide": (1280, 720), "wide too": (1280, 720), "tall": (60, 120), "square": (90, 90), "line": (2000, 2)}
    paths = {name: tmp_path / f"{name}.png" for name in sizes}
    for name, size in sizes.items():
        photo.resize(size).save(paths[name], compress_level=1)
    return paths


def images(files: dict[str, Path], *names: str) -> list[Any]:
    return [word for name in names for word in ("--image", files[name])]


def test_unseen_parts_are_reported_once_a_size(bundle: Bundles, files: dict[str, Path]) -> None:
    root = bundle("gqa-112", budgets=("retain-64",), max_images=4)
    outcome = run("sinkprune-run", root, *images(files, "square", "wide", "tall", "wide too"), *OPTIONS, "--json")
    assert outcome.stderr == f"{files['wide']}: {WIDE}\n{files['tall']}: {TALL}\n"
    assert json.loads(outcome.stdout)["seen_share"] == [1, pytest.approx(112 / 199), 0.5, pytest.approx(112 / 199)]
