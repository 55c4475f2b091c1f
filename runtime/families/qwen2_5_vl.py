"""Qwen2.5-VL: pictures at their own resolution, 2x2 patches a token, positions along time, height and width."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from PIL import Image

from sinkprune.bundle import Manifest
from sinkprune.runtime.qwen_processor import Grid, QwenProcessor, Size
from sinkprune.runtime.rotary import Positions, Rotary
from sinkprune.runtime.window_index import window_index

Array = np.ndarray[Any, Any]


class Qwen25VL:
    """The image side of a Qwen2.5-VL bundle. An image is one group; its tokens are in raster order."""

    between_rows: str | None = None
    most_groups = 1

    def __init__(self, manifest: Manifest) -> None:
        self._vision, self._width = manifest.vision, manifest.language_model.hidden_size
        self._merge: int = manifest.vision["merge_size"]
        self._processor = QwenProcessor(manifest.processor)
        head = self._vision["hidden_size"] // self._vision["num_heads"]
        # Half of a head turns with the row, half with the column.
        self._rotary = Rotary(self._vision["rope_theta"], head // 2, np.dtype(np.float32))

    def preprocess(self, image: Image.Image) -> dict[str, Array]:
        """Pixel patches, and the index tables and rotary tables of their grid."""
        grid = self._processor.grid(image.size)
        windows = window_index(grid, self._merge, self._vision["window_side"])
        tables = [self._rotary.tables(axis) for axis in self._patch_positions(grid)]
        cos, sin = (np.concatenate(table, axis=-1) for table in zip(*tables, strict=True))
        return {
            "pixel_values": self._processor(image),
            "cos": cos,
            "sin": sin,
            "window_index": windows.index,
            "patch_slot": windows.slot,
        }

    def visual_tokens(self, size: Size) -> int:
        """N: the merged tokens of an image of `size` (width, height); raises `ImageError`."""
        return self._processor.grid(size).patches // self._merge**2

    def groups(self, size: Size) -> int:
        """The image."""
        return 1

    def unpruned_rows(self, size: Size) -> Array:
        """Every merged token, in raster order."""
        return np.arange(self.visual_tokens(size))

    def most_unpruned_rows(self, most: int) -> int:
        """N."""
        return most

    def views(self, size: Size) -> list[range]:
        """One."""
        return [range(self.visual_tokens(size))]

    def token_boxes(self, size: Size) -> Array:
        """[N,4]: left, top, right, bottom of each merged token in pixels of the image."""
        _, rows, columns = self._merged(size)
        xs, ys = np.linspace(0, size[0], columns + 1), np.linspace(0, size[1], rows + 1)
        return np.array([[xs[c], ys[r], xs[c + 1], ys[r + 1]] for r in range(rows) for c in range(columns)])

    def positions(self, texts: Sequence[int], images: Sequence[tuple[Size, Array]]) -> Positions:
        """mRoPE: text counts on along all three axes, an image token adds its (time, row, column).

        Text behind an image goes on from the longer of its sides, whatever was dropped.
        """
        rows, place = [], 0
        for count, image in zip_longest(texts, images):
            rows.append(np.broadcast_to(np.arange(place, place + count), (3, count)))
            place += count
            if image is not None:
                size, tokens = image
                grid = self._merged(size)
                rows.append(place + np.array(np.unravel_index(tokens, grid)))
                place += max(grid.h, grid.w)
        return Positions(np.concatenate(rows, axis=1), place)

    def vision_sizes(self, most: int) -> dict[str, tuple[int, int, int]]:
        """Patches, and windows: full ones usually, and at most those of a picture one token wide."""
        unit, side = self._merge**2, self._vision["window_side"]
        return {
            "patches": (unit, unit * most, unit * most),
            "windows": (1, -(-most // side**2), -(-most // side)),
        }

    def encode_flops(self, size: Size, kept: int) -> int:
        """Matmul FLOPs of patches, blocks and merger; what is `kept` goes to the LLM as it is."""
        vision, grid = self._vision, self._processor.grid(size)
        n, d, m = grid.patches, vision["hidden_size"], vision["intermediate_size"]
        patches = n * 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2 * d
        linear = n * (4 * d * d + 3 * d * m)
        filled = (window_index(grid, self._merge, vision["window_side"]).index >= 0).sum(axis=1)
        full = len(vision["full_attention_blocks"])
        windowed = vision["num_blocks"] - full
        pairs = windowed * int((filled**2).sum()) + full * grid.t * (grid.h * grid.w) ** 2
        joined = d * self._merge**2
        merger = n // self._merge**2 * (joined**2 + joined * self._width)
        return int(2 * (patches + vision["num_blocks"] * linear + 2 * pairs * d + merger))

    def _merged(self, size: Size) -> Grid:
        """The merged tokens of an image along time, height and width."""
        t, h, w = self._processor.grid(size)
        return Grid(t, h // self._merge, w // self._merge)

    def _patch_positions(self, grid: Grid) -> tuple[Array, Array]:
        """Row and column [patches] of each patch, the patches of a merged token together."""
        merge, (t, h, w) = self._merge, grid
        places = np.indices((h, w)).reshape(2, h // merge, merge, w // merge, merge)
        rows, columns = np.tile(places.transpose(0, 1, 3, 2, 4).reshape(2, -1), t)
        return rows, columns
