"""Pictures with more pixels than a Qwen bundle takes, and clips with more frames: users learn what the model sees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from sinkprune import Pipeline, ScaledDownWarning
from sinkprune.contract.bundle import read_bundle
from sinkprune.runtime.families import Family, load_family
from sinkprune.runtime.media.picture_warnings import scaled_down

Bundles = Callable[..., Path]


@pytest.fixture(scope="module")
def root(bundle: Bundles) -> Path:
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


def test_python_warns_once_for_each_size(root: Path, photo: Image.Image) -> None:
    pipeline = Pipeline.load(root)
    with pytest.warns(ScaledDownWarning) as caught:
        for size in ((1600, 1200), (1600, 1200), (56, 56), (1200, 1600)):
            pipeline.generate(photo.resize(size), "What?", max_new_tokens=1)
    sizes = [str(warning.message).split(" picture")[0] for warning in caught]
    assert sizes == ["the model sees the 1600x1200", "the model sees the 1200x1600"]


@pytest.fixture(scope="module")
def clips(bundle: Bundles) -> Family:
    return load_family(read_bundle(bundle("qwen-tied", max_frames=4)).manifest, None)
