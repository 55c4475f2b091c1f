"""Qwen3-VL: the image side of Qwen2-VL with learned positions, and the time as text before each frame of a clip."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.precision import Array
from sinkprune.contract.towers import Qwen3Tower
from sinkprune.runtime.families.qwen2_5_vl import Qwen25VL
from sinkprune.runtime.media.clip import Picture, SampledFrames, end_to_end_indices
from sinkprune.runtime.processors.qwen import Grid, Qwen3Processor

_START, _END = "<|vision_start|>", "<|vision_end|>"


class Qwen3VL(Qwen25VL):
    """The image side of a Qwen3-VL bundle."""

    _mlp_matrices = 2
    _processing = Qwen3Processor
    _sampling = staticmethod(end_to_end_indices)

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest)
        tower = manifest.tower(Qwen3Tower)
        self._side, self._mergers = tower.position_side, 1 + len(tower.deepstack_blocks)

    def layout(self, picture: Picture) -> VisualLayout:
        """Return a group for each temporal patch, and for clips the texts with their times; raises `ImageError`."""
        layout = super().layout(picture)
        return replace(layout, texts=self._texts(picture)) if isinstance(picture, SampledFrames) else layout

    def inputs(self, picture: Picture) -> dict[str, Array]:
        """Return pixel patches, rotary tables and learned positions of their grid; raises `ImageError`."""
        index, weight = self._corners(self._processor.grid(picture.size))
        return {**super().inputs(picture), "position_index": index, "position_weight": weight}

    def _times(self, frames: int, clip: SampledFrames) -> Array:
        """Return [T] zeros: each temporal patch has the positions of an image, because the time is text."""
        return np.zeros(frames, np.int64)

    def _texts(self, clip: SampledFrames) -> tuple[str, ...]:
        """Return texts with the mean time of each temporal patch, to a tenth of a second (Qwen3VLProcessor)."""
        together = self._tower.temporal_patch_size
        # The last frame fills an incomplete patch.
        seconds = [*clip.seconds, *clip.seconds[-1:] * (-len(clip.seconds) % together)]
        times = [(seconds[i] + seconds[i + together - 1]) / 2 for i in range(0, len(seconds), together)]
        stamps = [f"<{time:.1f} seconds>{_START}" for time in times]
        return (stamps[0], *(f"{_END}{stamp}" for stamp in stamps[1:]), _END)

    def _corners(self, grid: Grid) -> tuple[Array, Array]:
        """Return [patches,4] int64 and float: each patch's four neighbours in the position table, and their shares.

        Interpolation is bilinear. The corners of the table are those of the picture.
        """
        positions, sides = self._patch_positions(grid), (grid.h, grid.w)
        low, high, share = [], [], []
        for place, size in zip(positions, sides, strict=True):
            at = place.astype(np.float32) * np.float32(self._side - 1) / np.float32(max(size - 1, 1))
            low.append(np.floor(at).astype(np.int64))
            high.append(np.minimum(low[-1] + 1, self._side - 1))
            share.append(at - np.floor(at))
        rows, columns = (np.stack(ends, axis=1) for ends in zip(low, high, strict=True))
        down, right = (np.stack([1 - part, part], axis=1) for part in share)
        index = rows[:, :, None] * self._side + columns[:, None, :]
        weight = down[:, :, None] * right[:, None, :]
        return index.reshape(-1, 4), weight.reshape(-1, 4).astype(self._dtype)
