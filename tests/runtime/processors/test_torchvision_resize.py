"""Frames are resized as torchvision resizes uint8 tensors: the same bytes at every size, up and down."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from sinkprune.runtime.families.qwen_processor import TorchvisionResize

SIZES = st.tuples(st.integers(1, 150), st.integers(1, 150))


def assert_same_bytes(size: tuple[int, int], resized: tuple[int, int]) -> None:
    """Noise, whose edges are as steep as edges can be, against what torchvision calls for uint8 on a CPU."""
    pixels = np.random.default_rng(0).choice(np.array([0, 1, 127, 254, 255], np.uint8), (size[1], size[0], 3))
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    expected = torch.nn.functional.interpolate(tensor, resized[::-1], mode="bicubic", antialias=True)
    found = TorchvisionResize(size, resized)(Image.fromarray(pixels))
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, expected[0].permute(1, 2, 0).numpy())


@given(SIZES, SIZES)
@example((112, 84), (112, 84))
@example((100, 61), (100, 84))
@example((100, 61), (112, 61))
@example((1, 1), (28, 56))
@settings(deadline=None)
def test_any_size_to_any_other(size: tuple[int, int], resized: tuple[int, int]) -> None:
    assert_same_bytes(size, resized)


@pytest.mark.parametrize(
    ("size", "resized"),
    [((640, 480), (644, 476)), ((1919, 1081), (616, 336)), ((3840, 28), (28, 28)), ((28, 9000), (56, 28))],
    ids=str,
)
def test_sizes_of_cameras_and_shares_too_fine_for_single_precision(
    size: tuple[int, int], resized: tuple[int, int]
) -> None:
    assert_same_bytes(size, resized)
