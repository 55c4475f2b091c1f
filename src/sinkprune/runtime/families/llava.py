"""LLaVA-1.5: one square crop, and one group of patch tokens in raster order."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import numpy as np
from PIL import Image

from sinkprune.contract.budgets import Share
from sinkprune.contract.errors import BundleError, VideoError
from sinkprune.contract.flops import vit_flops
from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.precision import DTYPES, Array
from sinkprune.contract.towers import ViTTower
from sinkprune.runtime.media.clip import Picture, SampledFrames, Video
from sinkprune.runtime.media.fits import Fit, share_within
from sinkprune.runtime.processors.grid_boxes import grid_boxes
from sinkprune.runtime.processors.pixel_values import check_settings
from sinkprune.runtime.processors.square import SquareProcessor
from sinkprune.runtime.processors.torchvision_resize import PixelSize


class Llava:
    """The image side of a LLaVA-1.5 bundle."""

    between_rows: str | None = None

    def __init__(self, manifest: Manifest) -> None:
        self._tower = manifest.tower(ViTTower)
        self._side = self._tower.image_size // self._tower.patch_size
        if self._side**2 != self._tower.tokens:
            raise BundleError(
                f"the bundle's `vision` has {self._tower.tokens} tokens, expected {self._side**2}, one for each "
                f"patch of {self._tower.patch_size} pixels in a picture of {self._tower.image_size}. Export it again."
            )
        check_settings(manifest.processor, DTYPES[manifest.precision])
        self._processor = SquareProcessor(manifest.processor)
        d, width = self._tower.hidden_size, manifest.language_model.hidden_size
        self._projector_flops = 2 * (d * width + width**2)

    def layout(self, picture: Picture) -> VisualLayout:
        """Return one group, or several for tiles; raises `VideoError` for a clip."""
        return self._layout(_image(picture).size)

    def inputs(self, picture: Picture) -> dict[str, Array]:
        """Return `pixel_values` [G,3,image_size,image_size] fp32 of an image; raises `ImageError`."""
        return {"pixel_values": self._pixels(_image(picture))}

    def check_video(self) -> None:
        """Raise `VideoError`: LLaVA takes no video."""
        raise _no_video()

    def shown(self, video: Video) -> SampledFrames:
        """Raise `VideoError`: LLaVA takes no video."""
        raise _no_video()

    def fitted(self, fit: Fit) -> Llava | None:
        """Return a copy that turns pictures into the tower's square by `fit`."""
        other = copy(self)
        other._processor = self._processor.fitted(fit, self._tower.image_size)
        return other

    def smaller(self, share: Share) -> Llava:
        """Raise `BundleError`: the tower's square has one size."""
        raise BundleError(
            "the bundle has a plan for smaller pictures, and its tower takes one size. Export it again."
        )

    def largest(self) -> dict[str, VisualLayout]:
        """Return the layout of any image, because all have the same number of tokens."""
        return {"image": self._layout((self._tower.image_size, self._tower.image_size))}

    def vision_sizes(self, tokens: int, groups: int) -> dict[str, tuple[int, int, int]]:
        """Return no dimensions, because every image has the same size."""
        return {}

    def _pixels(self, image: Image.Image) -> Array:
        return self._processor(image)[None]

    def _layout(self, size: PixelSize) -> VisualLayout:
        area = self._processor.source_box(size)
        boxes = grid_boxes(area, self._side, self._side)
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
            # A row more, for the CLS token.
            tower_flops=groups * vit_flops(self._tower, self._tower.tokens + 1),
            projector_flops=self._projector_flops,
        )


def _image(picture: Picture) -> Image.Image:
    if isinstance(picture, SampledFrames):
        raise _no_video()
    return picture


def _no_video() -> VideoError:
    return VideoError("this bundle takes no video: its model is made for images. Give images, or another bundle.")


FAMILY = Llava
