"""LLaVA-NeXT: the whole image and its tiles, one group each; unpruned the model's own rows, with newlines."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from sinkprune.contract.manifest import Manifest
from sinkprune.runtime.families.llava import Llava
from sinkprune.runtime.grid_boxes import grid_boxes
from sinkprune.runtime.llava_next_processor import LlavaNextProcessor

Array = np.ndarray[Any, Any]
Size = tuple[int, int]


class LlavaNext(Llava):
    """The image side of a LLaVA-NeXT bundle."""

    between_rows: str | None = "image_newline"

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest)
        self._image_size: int = self._vision["image_size"]
        self._side = self._image_size // self._vision["patch_size"]
        self._tiles = LlavaNextProcessor(manifest.processor, self._image_size)
        self._pinpoints = manifest.processor["image_grid_pinpoints"]

    @property
    def most_groups(self) -> int:
        """The whole image and the most tiles."""
        return 1 + max(height * width for height, width in self._pinpoints) // self._image_size**2

    def groups(self, size: Size) -> int:
        """The whole image and its tiles."""
        canvas = self._tiles.canvas(size)
        return 1 + canvas.width * canvas.height // self._image_size**2

    def preprocess(self, image: Image.Image) -> dict[str, Array]:
        """`pixel_values` [G,3,image_size,image_size] fp32."""
        return {"pixel_values": self._tiles(image)}

    def unpruned_rows(self, size: Size) -> Array:
        """The whole image's tokens, then the tiles' in the raster order of the canvas, unpadded; -1 ends a line."""
        side, n, canvas = self._side, self._side**2, self._tiles.canvas(size)
        rows, columns = (length // self._image_size for length in (canvas.height, canvas.width))
        tokens = n + np.arange(rows * columns * n).reshape(rows, columns, side, side)
        raster = tokens.transpose(0, 2, 1, 3).reshape(rows * side, columns * side)
        lines = raster[self._tiles.unpadded(size, columns * side, rows * side)]
        return np.concatenate([np.arange(n), np.pad(lines, ((0, 0), (0, 1)), constant_values=-1).ravel()])

    def pictures(self, most: int) -> dict[str, tuple[int, int]]:
        """Every tile has as many tokens."""
        return {"image": (most, self.most_groups)}

    def most_unpruned_rows(self, most: int) -> int:
        """Those of an image that fills its canvas."""
        return max(len(self.unpruned_rows((width, height))) for height, width in self._pinpoints)

    def token_boxes(self, size: Size) -> Array:
        """[G*N,4]: left, top, right, bottom of each patch in pixels of the image; those on padding lie outside it."""
        side, canvas = self._side, self._tiles.canvas(size)
        boxes = [grid_boxes((0, 0, *size), side, side)]
        x, y = size[0] / canvas.shown[0], size[1] / canvas.shown[1]
        for top in range(0, canvas.height, self._image_size):
            for left in range(0, canvas.width, self._image_size):
                corner, length = ((left - canvas.left) * x, (top - canvas.top) * y), self._image_size
                tile = (*corner, corner[0] + length * x, corner[1] + length * y)
                boxes.append(grid_boxes(tile, side, side))
        return np.concatenate(boxes)

    def views(self, size: Size) -> list[range]:
        """The whole image, and its tiles side by side."""
        n = self._side**2
        return [range(n), range(n, self.groups(size) * n)]

    def encode_flops(self, size: Size, kept: int) -> int:
        """Matmul FLOPs of the tower on every group, and of the projector for `kept` tokens of all groups."""
        projector = super().encode_flops(size, kept) - super().encode_flops(size, 0)
        return self.groups(size) * super().encode_flops(size, 0) + projector
