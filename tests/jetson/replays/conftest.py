"""A bundle, pictures, and a bag of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from support.models.bags import START_NS, Said, frames, text, write_bag
from support.programs.replays import COUNT


@pytest.fixture(scope="module")
def model(bundle: Callable[..., Path]) -> Path:
    return bundle("gqa-112", "fp32", ("retain-64",))


@pytest.fixture(scope="module")
def pictures(photo: Image.Image) -> list[Image.Image]:
    """Five views of the photo, so that answers differ."""
    return [photo.crop((90 * number, 40, 90 * number + 200, 190)) for number in range(COUNT)]


@pytest.fixture(scope="module")
def bag(pictures: list[Image.Image], tmp_path_factory: pytest.TempPathFactory) -> Path:
    said = [Said("/words", START_NS, text("hello")), *frames(pictures)]
    return write_bag(tmp_path_factory.mktemp("bags") / "drive", said)
