"""The line about 16-bit pictures, whose values were scaled to 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sinkprune import DividedPictureWarning, Pipeline
from sinkprune.runtime.media.images import had_16_bits, read_image, to_rgb
from support.programs.commands import run

MESSAGE = (
    "16-bit greyscale was divided by 257. Its largest value is now 16 of 255. If that is too dark, scale the picture "
    "to 8 bits yourself.\n"
)


@pytest.fixture
def depth(tmp_path: Path) -> Path:
    """Millimetres up to 4 metres, as a depth camera writes them."""
    path = tmp_path / "depth.png"
    Image.fromarray(np.linspace(0, 4000, 90 * 90).astype(np.uint16).reshape(90, 90)).save(path)
    return path


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("sinkprune-run", ("--max-new-tokens", 1)),
        ("sinkprune-profile", ("--budgets", "none", "--repeat", 1, "--warmup", 0, "--new-tokens", 1)),
    ],
)
def test_one_line_names_the_largest_value(
    command: str, options: tuple[object, ...], bundle: Callable[..., Path], depth: Path
) -> None:
    root = bundle("gqa-112", "fp32", ("retain-64",), max_images=3)
    outcome = run(command, root, *("--image", depth) * 2, "--prompt", "What is this?", *options)
    assert (outcome.code, outcome.stderr) == (0, f"{depth}: {MESSAGE}")


def test_python_warns_once_of_a_picture_of_16_bits(bundle: Callable[..., Path], depth: Path) -> None:
    pipe = Pipeline.load(bundle("gqa-112", "fp32", ("retain-64",), max_images=3))
    with pytest.warns(DividedPictureWarning) as caught:
        for picture in (depth, read_image(depth)):
            pipe.generate(picture, "What?", max_new_tokens=1)
    assert [str(warning.message) for warning in caught] == [f"the picture: {MESSAGE.strip()}"]


def test_a_bright_picture_hides_no_dark_one(bundle: Callable[..., Path]) -> None:
    pipe = Pipeline.load(bundle("gqa-112", "fp32", ("retain-64",), max_images=3))
    bright, dark = (Image.fromarray(np.full((8, 8), 257 * value, np.uint16)) for value in (200, 25))
    with pytest.warns(DividedPictureWarning) as caught:
        for picture in (bright, dark, bright, dark):
            pipe.generate(picture, "What?", max_new_tokens=1)
    said = [str(warning.message) for warning in caught]
    assert [text.split(" of 255")[0].split()[-1] for text in said] == ["200", "25"]


def test_pictures_of_8_bits_were_not_scaled(depth: Path, tmp_path: Path) -> None:
    grey = tmp_path / "grey.png"
    Image.new("L", (4, 4), 9).save(grey)
    assert not had_16_bits(read_image(grey))
    with Image.open(depth) as opened:
        assert had_16_bits(to_rgb(opened)) and had_16_bits(read_image(depth))
