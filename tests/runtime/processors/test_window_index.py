"""Windows hold the patches that transformers lets attend to each other, and every patch finds back."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.vision_utils import get_vision_window_index

from sinkprune.runtime.families.qwen_processor import Grid, window_index

sides = st.integers(1, 15).map(lambda units: 2 * units)


@given(st.integers(1, 3), sides, sides)
def test_windows_are_those_of_transformers(t: int, h: int, w: int) -> None:
    units, bounds = get_vision_window_index(
        torch.tensor([[t, h, w]]), spatial_merge_size=2, window_size=112, patch_size=14
    )
    patches = (units[:, None] * 4 + torch.arange(4)).flatten().tolist()
    expected = [sorted(patches[start:end]) for start, end in pairwise(bounds.tolist())]
    windows = window_index(Grid(t, h, w), merge=2, side=4)
    assert windows.index.dtype == windows.slot.dtype == np.int64
    assert [sorted(window[window >= 0].tolist()) for window in windows.index] == expected


@given(st.integers(1, 3), sides, sides)
def test_every_patch_finds_back(t: int, h: int, w: int) -> None:
    windows = window_index(Grid(t, h, w), merge=2, side=4)
    assert windows.index.ravel()[windows.slot].tolist() == list(range(t * h * w))
