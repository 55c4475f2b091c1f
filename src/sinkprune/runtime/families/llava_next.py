"""LLaVA-NeXT: the whole image and its tiles, one group each; unpruned prompts have newline rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from PIL import Image

from sinkprune.contract.manifest import Manifest
from sinkprune.contract.precision import Array
from sinkprune.contract.schedule import VisualLayout, grid_boxes
from sinkprune.runtime.families.llava import Llava
from sinkprune.runtime.media.images import Fit
from sinkprune.runtime.processors.llava_next import Canvas, LlavaNextProcessor, unpadded
from sinkprune.runtime.processors.square import PixelSize


class LlavaNext(Llava):
    """The image side of a LLaVA-NeXT bundle."""

    between_rows: str | None = "image_newline"

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest)
        self._tiles = LlavaNextProcessor(manifest.processor, self._tower.image_size)
        self._pinpoints = manifest.processor["image_grid_pinpoints"]

    def fitted(self, fit: Fit) -> None:
        """Return None: the tiles show whole images of any shape."""

    def largest(self) -> dict[str, VisualLayout]:
        """Return a layout with the most tiles, and the longest prompt of an image that fills its canvas."""
        layouts = [self._layout((width, height)) for height, width in self._pinpoints]
        most = max(layouts, key=lambda layout: layout.groups)
        return {"image": replace(most, unpruned_rows=max((x.unpruned_rows for x in layouts), key=len))}

    def _pixels(self, image: Image.Image) -> Array:
        return self._tiles(image)

    def _layout(self, size: PixelSize) -> VisualLayout:
        canvas, n = self._tiles.canvas(size), self._tower.tokens
        groups = 1 + canvas.width * canvas.height // self._tower.image_size**2
        # The whole image, and its tiles side by side
        views = [range(n), range(n, groups * n)]
        return self._in_line(size, groups, self._rows(size, canvas), self._boxes(size, canvas), views)

    def _rows(self, size: PixelSize, canvas: Canvas) -> Array:
        """Return the tokens of the whole image, then of the canvas by lines, without padding; -1 ends a line."""
        side, n = self._side, self._tower.tokens
        rows, columns = (length // self._tower.image_size for length in (canvas.height, canvas.width))
        tokens = n + np.arange(rows * columns * n).reshape(rows, columns, side, side)
        raster = tokens.transpose(0, 2, 1, 3).reshape(rows * side, columns * side)
        lines = raster[unpadded(size, columns * side, rows * side)]
        return np.concatenate([np.arange(n), np.pad(lines, ((0, 0), (0, 1)), constant_values=-1).ravel()])

    def _boxes(self, size: PixelSize, canvas: Canvas) -> Array:
        """Return the boxes of all tokens. Those of patches on padding are outside the image."""
        side, length = self._side, self._tower.image_size
        boxes = [grid_boxes((0, 0, *size), side, side)]
        x, y = size[0] / canvas.shown[0], size[1] / canvas.shown[1]
        for top in range(0, canvas.height, length):
            for left in range(0, canvas.width, length):
                corner = ((left - canvas.left) * x, (top - canvas.top) * y)
                boxes.append(grid_boxes((*corner, corner[0] + length * x, corner[1] + length * y), side, side))
        return np.concatenate(boxes)
