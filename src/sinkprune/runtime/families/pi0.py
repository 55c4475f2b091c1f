"""pi0: a picture of each camera, in a square, and one group of patch tokens in raster order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import numpy as np
from PIL import Image

from sinkprune.contract.budgets import Share
from sinkprune.contract.errors import BundleError, VideoError
from sinkprune.contract.flops import vit_flops
from sinkprune.contract.image_settings import LeRobotResize
from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.precision import DTYPES, Array
from sinkprune.contract.towers import SiglipTower
from sinkprune.runtime.media.clip import Picture, SampledFrames, Video
from sinkprune.runtime.media.fits import Fit
from sinkprune.runtime.processors.grid_boxes import grid_boxes
from sinkprune.runtime.processors.padded import PaddedProcessor
from sinkprune.runtime.processors.pixel_values import check_settings
from sinkprune.runtime.processors.resize_with_pad import ResizeWithPad
from sinkprune.runtime.processors.torchvision_resize import PixelSize


class Pi0:
    """The image side of a pi0 bundle. A picture is the frame of a camera."""

    between_rows: str | None = None

    def __init__(self, manifest: Manifest) -> None:
        self._tower = manifest.tower(SiglipTower)
        self._side = self._tower.image_size // self._tower.patch_size
        if self._side**2 != self._tower.tokens:
            raise BundleError(
                f"the bundle's `vision` has {self._tower.tokens} tokens, expected {self._side**2}, one for each "
                f"patch of {self._tower.patch_size} pixels in a picture of {self._tower.image_size}. Export it again."
            )
        check_settings(manifest.processor, DTYPES[manifest.precision])
        self._processor = _processor(manifest.processor)
        self._projector_flops = 2 * self._tower.hidden_size * manifest.language_model.hidden_size

    def layout(self, picture: Picture) -> VisualLayout:
        """Return one group; raises `VideoError` for a clip."""
        return self._layout(_image(picture).size)

    def inputs(self, picture: Picture) -> dict[str, Array]:
        """Return `pixel_values` [1,3,image_size,image_size] fp32 of an image; raises `ImageError`."""
        return {"pixel_values": self._processor(_image(picture))[None]}

    def check_video(self) -> None:
        """Raise `VideoError`: a policy takes the last frame of each camera."""
        raise _no_video()

    def shown(self, video: Video) -> SampledFrames:
        """Raise `VideoError`: a policy takes the last frame of each camera."""
        raise _no_video()

    def fitted(self, fit: Fit) -> Pi0 | None:
        """Return None: policies are trained with one way to turn pictures into squares."""
        return None

    def smaller(self, share: Share) -> Pi0:
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

    def _layout(self, size: PixelSize) -> VisualLayout:
        tokens = np.arange(self._tower.tokens)
        return VisualLayout(
            size=size,
            groups=1,
            tokens=self._tower.tokens,
            unpruned_rows=tokens,
            boxes=grid_boxes(self._processor.shown_box(size), self._side, self._side),
            views=(range(self._tower.tokens),),
            # Kept rows keep their positions, which the expert's rotary embedding continues.
            places=tokens[None],
            extent=self._tower.tokens,
            tower_flops=vit_flops(self._tower, self._tower.tokens),
            projector_flops=self._projector_flops,
        )


def _processor(settings: Mapping[str, Any]) -> PaddedProcessor | ResizeWithPad:
    """Return what turns pictures into squares: LeRobot's functions by their names, else transformers' processor."""
    kind = settings.get("image_processor_type")
    return ResizeWithPad(settings) if kind in get_args(LeRobotResize) else PaddedProcessor(settings)


def _image(picture: Picture) -> Image.Image:
    if isinstance(picture, SampledFrames):
        raise _no_video()
    return picture


def _no_video() -> VideoError:
    return VideoError("a policy takes no video: it acts on the last frame of each camera. Give images.")


FAMILY = Pi0
