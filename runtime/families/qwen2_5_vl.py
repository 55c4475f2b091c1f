"""Qwen2.5-VL: pictures at their own resolution, 2x2 patches a token, positions along time, height and width."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from PIL import Image

from sinkprune.contract.errors import VideoError
from sinkprune.contract.manifest import Manifest
from sinkprune.runtime.clip import ClipSize, Shown, Video, shown
from sinkprune.runtime.grid_boxes import grid_boxes
from sinkprune.runtime.qwen_processor import Grid, QwenProcessor, Size
from sinkprune.runtime.rotary import Positions, Rotary
from sinkprune.runtime.window_index import window_index

Array = np.ndarray[Any, Any]


class Qwen25VL:
    """The image side of a Qwen2.5-VL bundle. An image is one group, a clip one for each two frames; tokens are in
    raster order."""

    between_rows: str | None = None
    _mlp_matrices = 3

    def __init__(self, manifest: Manifest) -> None:
        self._vision, self._width = manifest.vision, manifest.language_model.hidden_size
        self._merge: int = manifest.vision["merge_size"]
        self._processor = QwenProcessor(manifest.processor)
        self._video = manifest.processor.get("video")
        self._windowed_blocks = self._vision["num_blocks"] - len(self._vision["full_attention_blocks"])
        head = self._vision["hidden_size"] // self._vision["num_heads"]
        # Half of a head turns with the row, half with the column.
        self._rotary = Rotary(self._vision["rope_theta"], head // 2, np.dtype(np.float32))

    def preprocess(self, image: Image.Image | Shown) -> dict[str, Array]:
        """Pixel patches, and the index tables and rotary tables of their grid."""
        grid = self._processor.grid(image.size)
        tables = [self._rotary.tables(axis) for axis in self._patch_positions(grid)]
        cos, sin = (np.concatenate(table, axis=-1) for table in zip(*tables, strict=True))
        inputs = {
            "pixel_values": self._processor(image).reshape(grid.t, grid.h * grid.w, -1),
            "cos": cos.repeat(grid.t, axis=0),
            "sin": sin.repeat(grid.t, axis=0),
        }
        if self._windowed_blocks:
            windows = window_index(grid, self._merge, self._vision["window_side"])
            inputs |= {"window_index": windows.index, "patch_slot": windows.slot.reshape(grid.t, -1)}
        return inputs

    def shown(self, video: Video) -> Shown:
        """Frames as the processor's settings sample them; raises `VideoError` where the bundle is made for images."""
        if self._video is None:
            raise VideoError("this bundle takes no video. Export the checkpoint again with --max-frames.")
        return shown(video, self._video, self._vision["temporal_patch_size"])

    def visual_tokens(self, size: Size | ClipSize) -> int:
        """N: the merged tokens of an image of `size` (width, height), or of a clip's frame; raises `ImageError`."""
        grid = self._merged(size)
        return grid.h * grid.w

    def groups(self, size: Size | ClipSize) -> int:
        """The image, or the frames of a clip that are seen at once."""
        return self._processor.grid(size).t

    @property
    def most_groups(self) -> int:
        """Those of the longest clip."""
        frames = self._video["max_frames"] if self._video else 1
        return -(-frames // self._vision["temporal_patch_size"])

    def unpruned_rows(self, size: Size | ClipSize) -> Array:
        """Every merged token, in raster order."""
        return np.arange(self._merged(size).patches)

    def pictures(self, most: int) -> dict[str, tuple[int, int]]:
        """Images, of one group; and clips, whose frames may have fewer tokens."""
        frame: int = self._video["most_tokens"] if self._video else 0
        image, clip = {"image": (most, 1)}, {"clip": (frame, self.most_groups)}
        if frame == most:
            return clip
        return clip | image if self.most_groups > 1 else image

    def most_unpruned_rows(self, most: int) -> int:
        """N times G."""
        return max(n * groups for n, groups in self.pictures(most).values())

    def views(self, size: Size | ClipSize) -> list[range]:
        """One for each frame."""
        n = self.visual_tokens(size)
        return [range(start, start + n) for start in range(0, n * self.groups(size), n)]

    def token_boxes(self, size: Size | ClipSize) -> Array:
        """[G*N,4]: left, top, right, bottom of each merged token in pixels of the image."""
        frames, rows, columns = self._merged(size)
        return np.tile(grid_boxes((0, 0, size[0], size[1]), rows, columns), (frames, 1))

    def positions(self, texts: Sequence[int], images: Sequence[tuple[Size | ClipSize, Array]]) -> Positions:
        """mRoPE: text counts on along all three axes, a token of an image adds its (time, row, column).

        Text behind an image goes on from the longer of its sides, whatever was dropped and however long a clip lasts:
        so does transformers' `get_rope_index`. New tokens go on from the largest position of all.
        """
        rows, place, latest = [], 0, 0
        for count, image in zip_longest(texts, images):
            rows.append(np.broadcast_to(np.arange(place, place + count), (3, count)))
            place += count
            if image is not None:
                size, tokens = image
                grid = self._merged(size)
                along = np.array(np.unravel_index(tokens, grid))
                times = self._times(size, grid.t)
                rows.append(place + np.stack([times[along[0]], along[1], along[2]]))
                latest = max(latest, place + int(times[-1]) + 1)
                place += max(grid.h, grid.w)
        return Positions(np.concatenate(rows, axis=1), max(place, latest))

    def _times(self, size: Size | ClipSize, frames: int) -> Array:
        """[T] the position in time of each temporal patch: `tokens_per_second`, whole numbers."""
        if not isinstance(size, ClipSize):
            return np.arange(frames)
        seconds = np.float32(self._vision["temporal_patch_size"] / size.fps)
        each = np.float32(self._vision["tokens_per_second"]) * seconds
        return (np.arange(frames, dtype=np.float32) * each).astype(np.int64)

    def vision_sizes(self, n: int, groups: int) -> dict[str, tuple[int, int, int]]:
        """Patches of a frame, and windows: full ones usually, and at most those of pictures one token wide."""
        unit, side = self._merge**2, self._vision["window_side"]
        patches = {"patches": (unit, unit * n, unit * n)}
        if not self._windowed_blocks:
            return patches
        return {**patches, "windows": (1, groups * -(-n // side**2), groups * -(-n // side))}

    def encode_flops(self, size: Size | ClipSize, kept: int) -> int:
        """Matmul FLOPs of patches, blocks and merger; what is `kept` goes to the LLM as it is."""
        vision, grid = self._vision, self._processor.grid(size)
        n, d, m = grid.patches, vision["hidden_size"], vision["intermediate_size"]
        patches = n * 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2 * d
        linear = n * (4 * d * d + self._mlp_matrices * d * m)
        pairs = len(vision["full_attention_blocks"]) * grid.t * (grid.h * grid.w) ** 2
        if self._windowed_blocks:
            filled = (window_index(grid, self._merge, vision["window_side"]).index >= 0).sum(axis=1)
            pairs += self._windowed_blocks * int((filled**2).sum())
        joined = d * self._merge**2
        merger = n // self._merge**2 * (joined**2 + joined * self._width)
        return int(2 * (patches + vision["num_blocks"] * linear + 2 * pairs * d + merger))

    def _merged(self, size: Size | ClipSize) -> Grid:
        """The merged tokens of an image along time, height and width."""
        t, h, w = self._processor.grid(size)
        return Grid(t, h // self._merge, w // self._merge)

    def _patch_positions(self, grid: Grid) -> tuple[Array, Array]:
        """Row and column of each patch of a frame, the patches of a merged token together."""
        merge, (_, h, w) = self._merge, grid
        places = np.indices((h, w)).reshape(2, h // merge, merge, w // merge, merge)
        rows, columns = places.transpose(0, 1, 3, 2, 4).reshape(2, -1)
        return rows, columns
