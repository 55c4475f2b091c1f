"""Notes about pictures that the model sees otherwise: in part, smaller, the first frame, with fewer bits."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from sinkprune import FirstFrameWarning, PartlySeenWarning, Pipeline, ScaledDownWarning
from sinkprune.contract.bundle import read_bundle
from sinkprune.runtime.families import Family, load_family
from sinkprune.runtime.media.images import frame_count, read_header, read_image, read_image_bytes, to_rgb
from sinkprune.runtime.media.picture_warnings import scaled_down
from support.programs.commands import succeed

FIRST = "the model sees the first of 3 frames. Give frames as files of their own."
COLOURS = ("red", "lime", "blue")


def animated(path: Path) -> Path:
    """Write a file of three frames."""
    first, *others = (Image.new("RGB", (90, 90), colour) for colour in COLOURS)
    first.save(path, save_all=True, append_images=others)
    return path


@pytest.mark.parametrize("suffix", ["gif", "png", "tiff", "webp"])
def test_frames_are_counted_in_each_format(suffix: str, tmp_path: Path) -> None:
    path = animated(tmp_path / f"anim.{suffix}")
    with Image.open(path) as opened:
        images = read_image(path), read_image_bytes(path.read_bytes()), to_rgb(opened)
    for image in images:
        assert frame_count(image) == read_header(path)[0] == 3
        red, green, blue = image.getpixel((4, 4))  # type: ignore[misc]
        assert red > 240 > 10 > max(green, blue)


def test_views_of_a_jpeg_are_frames_and_its_previews_are_none(tmp_path: Path) -> None:
    """In an MPO, the type of a view is Disparity (CIPA DC-007, 5.2.3.3.1): stereo cameras write that."""
    path, picture = tmp_path / "phone.jpg", Image.effect_noise((90, 90), 80).convert("RGB")
    picture.save(path, "MPO", save_all=True, append_images=[picture.rotate(90), picture.resize((9, 9))])
    with Image.open(path) as opened:
        assert frame_count(read_image(path)) == frame_count(to_rgb(opened)) == read_header(path)[0] == 1
        size = opened.mpinfo[0xB002][1]["Size"]  # type: ignore[attr-defined]
    undefined, disparity = (struct.pack("<LL", kind, size) for kind in (0, 0x20002))
    assert path.read_bytes().count(undefined) == 1
    path.write_bytes(path.read_bytes().replace(undefined, disparity))
    with Image.open(path) as opened:
        assert frame_count(read_image(path)) == frame_count(to_rgb(opened)) == read_header(path)[0] == 2


@pytest.mark.parametrize("suffix", ["gif", "tiff"])
def test_damage_after_the_first_frame_rejects_nothing(suffix: str, tmp_path: Path) -> None:
    first, *others = (Image.effect_noise((40, 40), 80).convert("RGB") for _ in range(3))
    first.save(tmp_path / f"anim.{suffix}", save_all=True, append_images=others)
    whole, counts = (tmp_path / f"anim.{suffix}").read_bytes(), set[int]()
    for end in range(len(whole) * 17 // 50, len(whole), 37):
        counts.add(frame_count(read_image_bytes(whole[:end])))
        with Image.open(io.BytesIO(whole[:end])) as opened:
            assert to_rgb(opened).size == (40, 40)
    assert {2, 3} <= counts <= {1, 2, 3}


@pytest.fixture(scope="module")
def root(bundle: Callable[..., Path]) -> Path:
    return bundle("qwen-tied")


@pytest.fixture(scope="module")
def family(root: Path) -> Family:
    return load_family(read_bundle(root).manifest, None)


@given(width=st.integers(1, 2000), height=st.integers(1, 2000))
@example(width=14, height=415)
def test_a_picture_is_reported_if_the_limit_shrinks_it(width: int, height: int, family: Family) -> None:
    if max(width, height) > 200 * min(width, height):
        return
    layout = family.layout(Image.new("L", (width, height)))
    assert layout.seen_size is not None
    seen_width, seen_height = layout.seen_size
    tower = family._tower  # type: ignore[attr-defined]
    side = tower.patch_size * tower.merge_size
    assert layout.tokens == seen_width * seen_height // side**2
    most = family._processor._settings["max_pixels"]  # type: ignore[attr-defined]
    if not round(width / side) or not round(height / side):
        # Narrower than half a token: transformers resizes such a picture by the least number of pixels.
        return
    limited = round(width / side) * round(height / side) * side**2 > most
    shrunk = seen_width * seen_height < 0.81 * width * height
    if scaled_down(layout):
        assert limited and shrunk
    elif limited and shrunk:
        # As small a change as that of rounding
        assert width - seen_width <= side / 2 and height - seen_height <= side / 2


def test_python_warns_once_of_each_kind_and_size(
    root: Path, bundle: Callable[..., Path], photo: Image.Image, tmp_path: Path
) -> None:
    gif, pipe = animated(tmp_path / "anim.gif"), Pipeline.load(bundle("gqa-112", "fp32", ("retain-64",)))
    with pytest.warns(FirstFrameWarning) as caught, Image.open(gif) as opened:
        for picture in (gif, read_image(gif), opened):
            answer = pipe.generate(picture, "What?", max_new_tokens=1)
    assert [str(warning.message) for warning in caught] == [f"the picture: {FIRST}"]
    assert answer.images[0].layout.seen_share == 1
    with pytest.warns(PartlySeenWarning, match=r"the model sees 67 % of the picture \(the middle 400x400") as caught:
        for _ in range(2):
            pipe.generate(photo, "What?", max_new_tokens=1)
    assert [warning.filename for warning in caught] == [__file__]
    pipe = Pipeline.load(root)
    with pytest.warns(ScaledDownWarning) as caught:
        for size in ((1600, 1200), (1600, 1200), (56, 56), (1200, 1600)):
            pipe.generate(photo.resize(size), "What?", max_new_tokens=1)
    sizes = [str(warning.message).split(" picture")[0] for warning in caught]
    assert sizes == ["the model sees the 1600x1200", "the model sees the 1200x1600"]


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("sinkprune-run", ("--max-new-tokens", 1, "--json")),
        ("sinkprune-profile", ("--budgets", "none", "--repeat", 1, "--warmup-rounds", 0, "--new-tokens", 1)),
    ],
)
def test_commands_print_one_line_for_each_file_and_size(
    command: str, options: tuple[object, ...], bundle: Callable[..., Path], photo: Image.Image, tmp_path: Path
) -> None:
    depths = np.linspace(0, 4000, 90 * 90).astype(np.uint16).reshape(90, 90)
    pictures = {"wide": photo.resize((1280, 720)), "tall": photo.resize((60, 120)), "depth": Image.fromarray(depths)}
    for name, picture in pictures.items():
        picture.save(tmp_path / f"{name}.png", compress_level=1)
    seen = ("wide", "depth", "tall", "wide")
    files = [animated(tmp_path / "anim.gif"), *(tmp_path / f"{name}.png" for name in seen)]
    words = [word for file in files for word in ("--image", file)]
    root = bundle("gqa-112", budgets=("retain-64",), max_images=5)
    outcome = succeed(command, root, *words, "--prompt", "What is this?", *options)
    for name, said in (
        ("anim.gif", FIRST),
        ("depth.png", "16 bits a channel were scaled to 8. The largest value is now 16 of 255."),
        ("wide.png", "the model sees 56 % of the picture (the middle 720x720 of 1280x720). --fit pad shows it all"),
        ("tall.png", "the model sees 50 % of the picture (the middle 60x60 of 60x120). --fit pad shows it all"),
    ):
        (line,) = [line for line in outcome.stderr.splitlines() if line.startswith(f"{tmp_path}/{name}: ")]
        assert said in line
    assert len(outcome.stderr.splitlines()) == 4
    if "--json" in options:
        partly = pytest.approx(112 / 199)
        assert json.loads(outcome.stdout)["seen_share"] == [1, partly, 1, 0.5, partly]
