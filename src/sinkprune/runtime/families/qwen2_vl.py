"""Qwen2-VL: the image side of Qwen2.5-VL, with positions in time that count frames."""

from __future__ import annotations

import numpy as np

from sinkprune.contract.precision import Array
from sinkprune.runtime.families.qwen2_5_vl import Qwen25VL
from sinkprune.runtime.media.clip import SampledFrames


class Qwen2VL(Qwen25VL):
    """The image side of a Qwen2-VL bundle."""

    _mlp_matrices = 2

    def _times(self, frames: int, clip: SampledFrames) -> Array:
        return np.arange(frames)
