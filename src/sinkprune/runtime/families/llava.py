"""LLaVA-1.5: one square crop, and one group of patch tokens in raster order."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import numpy as np

from sinkprune.contract.flops import vit_flops
from sinkprune.contract.layout import VisualLayout, grid_boxes
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.precision import Array
from sinkprune.contract.towers import SquareTower, ViTTower
from sinkprune.runtime.families.square_pictures import SquarePictures
from sinkprune.runtime.media.fits import Fit, share_within
from sinkprune.runtime.processors.square import SquareProcessor
from sinkprune.runtime.processors.torchvision_resize import PixelSize


class Llava(SquarePictures):
    """The image side of a LLaVA-1.5 bundle."""

    _processor: SquareProcessor
    no_video = "this bundle takes no video: its model is made for images. Give images, or another bundle."

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest, manifest.tower(SquareTower))
        self._processor = SquareProcessor(manifest.processor)
        d, width = self._tower.hidden_size, manifest.language_model.hidden_size
        self._projector_flops = 2 * (d * width + width**2)

    def fitted(self, fit: Fit) -> Llava | None:
        """Return a copy that turns pictures into the tower's square by `fit`."""
        other = copy(self)
        other._processor = self._processor.fitted(fit, self._tower.image_size)
        return other

    def _layout(self, size: PixelSize) -> VisualLayout:
        area = self._processor.source_box(size)
        # Patches may leave out the right and the bottom edge, less than a patch.
        left, top, right, bottom = area
        share = self._side * self._tower.patch_size / self._tower.image_size
        patched = left, top, left + share * (right - left), top + share * (bottom - top)
        boxes = grid_boxes(patched, self._side, self._side)
        layout = self._in_line(size, 1, np.arange(self._tower.tokens), boxes, [range(self._tower.tokens)])
        return replace(layout, seen_share=share_within(area, size))

    def _in_line(self, size: PixelSize, groups: int, rows: Array, boxes: Array, views: list[range]) -> VisualLayout:
        """Return a layout whose rows have their numbers in the prompt as positions."""
        return VisualLayout(
            size=size,
            groups=groups,
            tokens=self._tower.tokens,
            unpruned_rows=rows,
            boxes=boxes,
            views=tuple(views),
            places=None,
            extent=0,
            # CLIP has a row more, for the CLS token.
            tower_flops=groups * vit_flops(self._tower, self._tower.tokens + isinstance(self._tower, ViTTower)),
            projector_flops=self._projector_flops,
        )
