"""Qwen2-VL: Qwen2.5-VL's image side; time counts frames, whatever time lies between them."""

from __future__ import annotations

from typing import Any

import numpy as np

from sinkprune.runtime.clip import ClipSize
from sinkprune.runtime.families.qwen2_5_vl import Qwen25VL

Array = np.ndarray[Any, Any]


class Qwen2VL(Qwen25VL):
    """The image side of a Qwen2-VL bundle."""

    _mlp_matrices = 2

    def _times(self, size: tuple[int, int] | ClipSize, frames: int) -> Array:
        return np.arange(frames)
