"""The runtime side of LLaVA-1.5, and what families of square pictures share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from copy import copy
from dataclasses import replace

import numpy as np
from PIL import Image

from sinkprune.contract.budgets import Share
from sinkprune.contract.errors import BundleError, VideoError
from sinkprune.contract.manifest import Manifest, SquareTower, ViTTower
from sinkprune.contract.precision import DTYPES, Array
from sinkprune.contract.schedule import VisualLayout, grid_boxes, vit_flops
from sinkprune.runtime.families import Family
from sinkprune.runtime.media.clip import Picture, SampledFrames, Video
from sinkprune.runtime.media.images import Fit, share_within
from sinkprune.runtime.processors.square import PixelSize, SquareProcessor, check_settings


class SquarePictures(Family):
    """The part of an image side that depends on squares of one size alone."""

    between_rows: str | None = None
    no_video: str
    """Why the family takes no video."""
    _processor: Callable[[Image.Image], Array]

    def __init__(self, manifest: Manifest, tower: SquareTower) -> None:
        """Take the bundle's `tower`; raises `BundleError` for one that the graphs do not fit."""
        self._tower: SquareTower = tower
        self._side = tower.image_size // tower.patch_size
        if self._side**2 != tower.tokens:
            raise BundleError(
                f"the bundle's `vision` has {tower.tokens} tokens, expected {self._side**2}, one for each "
                f"patch of {tower.patch_size} pixels in a picture of {tower.image_size}. Export it again."
            )
        if tower.tokens > manifest.most_visual_tokens:
            raise BundleError(
                f"the bundle's `vision` has {tower.tokens} tokens, and its graphs take up to "
                f"{manifest.most_visual_tokens}. Export it again."
            )
        self._dtype = DTYPES[manifest.precision]
        check_settings(manifest.processor, self._dtype)

    def layout(self, picture: Picture) -> VisualLayout:
        """Return one group, or several for tiles; raises `VideoError` for a clip."""
        return self._layout(self._image(picture).size)

    def inputs(self, picture: Picture) -> dict[str, Array]:
        """Return `pixel_values` [G,3,image_size,image_size] of an image; raises `ImageError`."""
        return {"pixel_values": self._pixels(self._image(picture)).astype(self._dtype, copy=False)}

    def check_video(self) -> None:
        """Raise `VideoError`."""
        raise VideoError(self.no_video)

    def sample_frames(self, video: Video) -> SampledFrames:
        """Raise `VideoError`."""
        raise VideoError(self.no_video)

    def smaller(self, share: Share) -> Family:
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
        """Return [G,3,image_size,image_size] fp32."""
        return self._processor(image)[None]

    @abstractmethod
    def _layout(self, size: PixelSize) -> VisualLayout:
        """Return the layout of an image of `size` (width, height)."""

    def _image(self, picture: Picture) -> Image.Image:
        if isinstance(picture, SampledFrames):
            raise VideoError(self.no_video)
        return picture


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
