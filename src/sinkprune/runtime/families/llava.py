"""LLaVA-1.5's square pictures, resized, cropped and normalised as transformers does; others share parts of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from math import isqrt
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from sinkprune.contract.budgets import BARLESS_TOWER, Share
from sinkprune.contract.checks import from_json
from sinkprune.contract.errors import BundleError, ImageError, VideoError
from sinkprune.contract.manifest import Manifest, SquareSettings, SquareTower, ViTTower
from sinkprune.contract.precision import DTYPES, Array
from sinkprune.contract.schedule import VisualLayout, grid_boxes, merges_of, vit_flops
from sinkprune.runtime.families import Family, Fit
from sinkprune.runtime.media.frame import Frame, Picture, SampledFrames, Video, as_image

if TYPE_CHECKING:
    from sinkprune.runtime.families.bars import Bars
    from sinkprune.runtime.frames import FrameForm, FramePlan, PillowPlan

PixelSize = tuple[int, int]
"""Width and height in pixels, as Pillow orders them."""


def pixel_values(pixels: Array, settings: Mapping[str, Any]) -> Array:
    """Return uint8 `pixels` [height,width,3] as fp32, rescaled and normalised by preprocessor_config.json."""
    values = pixels.astype(np.float32)
    if settings["do_rescale"]:
        values = (pixels.astype(np.float64) * settings["rescale_factor"]).astype(np.float32)
    if settings["do_normalize"]:
        mean = np.asarray(settings["image_mean"], np.float32)
        std = np.asarray(settings["image_std"], np.float32)
        values = (values - mean) / std
    return values


def pixel_table(settings: Mapping[str, Any], dtype: np.dtype[Any]) -> Array:
    """Return [768] the `pixel_values` of all pixels, by channel."""
    levels = np.arange(256, dtype=np.uint8)[:, None, None].repeat(3, axis=2)
    return pixel_values(levels, settings)[:, 0].T.astype(dtype).ravel()


def check_settings(settings: Mapping[str, Any], dtype: np.dtype[Any]) -> None:
    """Raise `BundleError` for settings that turn a pixel into a value that is not finite in `dtype`.

    Values are linear in the pixels, so 0 and 255 have the extremes.
    """
    with np.errstate(all="ignore"):
        ends = pixel_values(np.array([[[0] * 3, [255] * 3]], np.uint8), settings).astype(dtype)
    if not np.isfinite(ends).all():
        used = {name: settings[name] for name in ("rescale_factor", "image_mean", "image_std")}
        raise BundleError(
            f"the bundle's `processor` makes pixels of {used} that are not finite in {dtype}. Mend "
            "preprocessor_config.json of the checkpoint and export it again."
        )


# A larger image after resizing is a panorama whose crop shows next to nothing of it.
_MAX_RESIZED_PIXELS = 100_000_000


class SquareProcessor:
    """Resizes, pads and crops images to one size, by the `settings` of preprocessor_config.json."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Check `settings`; raises `SchemaError` if they are malformed."""
        from_json(SquareSettings, settings, "$.processor")
        self._settings = settings

    def __call__(self, image: Image.Image) -> Array:
        """Return [3,height,width] fp32 of an RGB image; raises `ImageError` if it is empty or too long."""
        settings = self._settings
        if 0 in image.size:
            raise ImageError(f"the image has {image.width}x{image.height} pixels, expected at least 1x1.")
        if settings["do_pad"]:
            from sinkprune.runtime.families.fit import padded

            image = padded(image, self._padded_side(image.size), self._background())
        if settings["do_resize"]:
            image = image.resize(self._resized_size(image.size), Image.Resampling(settings["resample"]))
        pixels = np.asarray(image)
        if settings["do_center_crop"]:
            pixels = self._cropped(pixels)
        return np.ascontiguousarray(pixel_values(pixels, settings).transpose(2, 0, 1))

    def frame_plan(self, size: PixelSize) -> PillowPlan:
        """Return what a call computes of an image of `size`, for the graph of frames; raises `ImageError`."""
        from sinkprune.runtime.frames import Axis, PillowPlan

        columns, rows = (Axis(*axis) for axis in self._axes(size))
        # Without a resize, the weights of most filters are 0 and 1.
        resample = self._settings["resample"] if self._settings["do_resize"] else Image.Resampling.BICUBIC
        return PillowPlan((columns,), (rows,), resample=resample, bar=self._background())

    def keeps(self, size: PixelSize) -> bool:
        """Return whether an image of `size` stays as it is."""
        return self._axes(size) == [(length, 0, length, length, 0, length) for length in size]

    def fitted(self, fit: Fit, side: int) -> SquareProcessor:
        """Return a processor with these settings that turns pictures into squares of `side` pixels by `fit`."""
        from sinkprune.runtime.families.fit import fitted_settings

        return SquareProcessor(fitted_settings(self._settings, fit, side))

    def source_box(self, size: PixelSize) -> tuple[float, float, float, float]:
        """Return the area of an image of `size` that the model sees: left, top, right, bottom in its pixels.

        Raises `ImageError` if the image is too long.
        """
        # Multiply first, so that the edges of the picture are exact.
        (left, right), (top, bottom) = (
            [edge * whole / resized - before for edge in (first, first + taken)]
            for _, before, whole, resized, first, taken in self._axes(size)
        )
        return left, top, right, bottom

    def _axes(self, size: PixelSize) -> list[tuple[int, int, int, int, int, int]]:
        """Return the fields of an `Axis` of frames, of columns and of rows, for an image of `size`.

        Raises `ImageError` if the image is too long.
        """
        settings = self._settings
        whole = (self._padded_side(size),) * 2 if settings["do_pad"] else size
        taken = resized = self._resized_size(whole) if settings["do_resize"] else whole
        if settings["do_center_crop"]:
            taken = settings["crop_size"]["width"], settings["crop_size"]["height"]
        return [
            (length, (padded - length) // 2, padded, new, (new - count) // 2, count)
            for length, padded, new, count in zip(size, whole, resized, taken, strict=True)
        ]

    def _padded_side(self, size: PixelSize) -> int:
        from sinkprune.runtime.families.fit import padded_side

        return padded_side(size, _MAX_RESIZED_PIXELS)

    def _background(self) -> tuple[int, int, int]:
        red, green, blue = (int(value * 255) for value in self._settings["image_mean"])
        return red, green, blue

    def _resized_size(self, size: PixelSize) -> PixelSize:
        wanted = self._settings["size"]
        if "shortest_edge" not in wanted:
            return wanted["width"], wanted["height"]
        (width, height), edge = size, wanted["shortest_edge"]
        resized_long = int(edge * max(size) / min(size))
        if edge * resized_long > _MAX_RESIZED_PIXELS:
            raise ImageError(
                f"the image has {width}x{height} pixels; with its short side at {edge} as the model wants it, the "
                f"long side would have {resized_long}. Crop it to an aspect ratio below "
                f"{_MAX_RESIZED_PIXELS // edge**2}:1."
            )
        return (edge, resized_long) if width <= height else (resized_long, edge)

    def _cropped(self, pixels: Array) -> Array:
        height, width = (self._settings["crop_size"][side] for side in ("height", "width"))
        missing = (max(0, height - pixels.shape[0]), max(0, width - pixels.shape[1]), 0)
        pixels = np.pad(pixels, [(-(-count // 2), count // 2) for count in missing])
        top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
        return pixels[top : top + height, left : left + width]


class SquarePictures(Family):
    """The part of an image side that depends on squares of one size alone."""

    between_rows: str | None = None
    no_video: str
    """Why the family takes no video."""
    _processor: Any
    """Returns [3,image_size,image_size] fp32 of an image."""
    _projector_flops: int
    """The FLOPs of a row in the projector."""
    _masked = False
    """Whether what is outside the resized picture is 0 after pixels are normalised."""
    _merges: Mapping[int, int] = MappingProxyType({})
    _bars: Bars | None = None
    """Leaves out the tokens on the bars of a padded picture."""

    def __init__(self, manifest: Manifest, tower: SquareTower) -> None:
        """Take the bundle's `tower`; raises `BundleError` for one that the graphs do not fit."""
        self._tower: SquareTower = tower
        self._side, each = isqrt(tower.tokens), tower.patch_size * isqrt(tower.patches_per_token)
        if self._side != tower.image_size // each:
            raise BundleError(
                f"the bundle's `vision` has {tower.tokens} tokens, expected {(tower.image_size // each) ** 2}, one "
                f"for each square of {each} pixels in a picture of {tower.image_size}. Export it again."
            )
        if tower.tokens > manifest.most_visual_tokens:
            raise BundleError(
                f"the bundle's `vision` has {tower.tokens} tokens, and its graphs take up to "
                f"{manifest.most_visual_tokens}. Export it again."
            )
        self._dtype, self._settings = DTYPES[manifest.precision], manifest.processor
        check_settings(manifest.processor, self._dtype)

    def layout(self, picture: Picture) -> VisualLayout:
        """Return one group, or several for tiles; raises `VideoError` for a clip."""
        layout = self._layout(self._checked(picture).size)
        return layout if self._bars is None else self._bars.left_out(layout, self._flops_of)

    def inputs(self, picture: Picture) -> dict[str, Array]:
        """Return `pixel_values` [G,3,image_size,image_size] of an image; raises `ImageError`."""
        pixels = self._pixels(as_image(self._checked(picture))).astype(self._dtype, copy=False)
        return {"pixel_values": pixels, **self.tables(picture)}

    def tables(self, picture: Picture) -> dict[str, Array]:
        """Return `places` [1,N]: the patches off the bars, for the tower that leaves out the others."""
        return {} if self._bars is None else self._bars.tables(self._layout(self._checked(picture).size))

    def frame_form(self) -> FrameForm | None:
        return self._square_form(views=1)

    def _square_form(self, views: int) -> FrameForm:
        from sinkprune.runtime.frames import square_form

        table = pixel_table(self._settings, self._dtype)
        return square_form(self._tower.image_size, table, masked=self._masked, views=views)

    def frame_plans(self, size: PixelSize) -> list[FramePlan]:
        return [self._processor.frame_plan(size)]

    def check_video(self) -> None:
        raise VideoError(self.no_video)

    def sample_frames(self, video: Video) -> SampledFrames:
        raise VideoError(self.no_video)

    def smaller(self, share: Share) -> Family:
        """Raise `BundleError`: the tower's square has one size."""
        raise BundleError(
            "the bundle has a plan for smaller pictures, and its tower takes one size. Export it again."
        )

    def for_tower(self, graph: str) -> SquarePictures:
        """Return a copy for the tower that merges tokens, or for the one that leaves out bars."""
        other = copy(self)
        if graph == BARLESS_TOWER:
            from sinkprune.runtime.families.bars import Bars

            other._bars = Bars()
        else:
            other._merges = merges_of(self._tower)
        return other

    def largest(self) -> dict[str, VisualLayout]:
        """Return the layout of any image, because all have the same number of tokens."""
        return {"image": self._layout((self._tower.image_size, self._tower.image_size))}

    def vision_sizes(self, tokens: int, groups: int) -> dict[str, tuple[int, int, int]]:
        """Return no dimensions, because every image has the same size."""
        return {}

    def _pixels(self, image: Image.Image) -> Array:
        values: Array = self._processor(image)
        return values[None]

    @property
    def _tower_flops(self) -> int:
        return self._flops_of(self._tower.patches)

    def _flops_of(self, tokens: int) -> int:
        # CLIP has a row more, for the CLS token.
        return vit_flops(self._tower, tokens + isinstance(self._tower, ViTTower), self._merges)

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
            tower_flops=groups * self._tower_flops,
            projector_flops=self._projector_flops,
        )

    def _one_group(self, size: PixelSize, area: tuple[float, float, float, float]) -> VisualLayout:
        """Return the layout of one group that shows `area`: left, top, right, bottom in pixels of the picture."""
        tokens, boxes = np.arange(self._tower.tokens), grid_boxes(area, self._side, self._side)
        return self._in_line(size, 1, tokens, boxes, [range(len(tokens))])

    @abstractmethod
    def _layout(self, size: PixelSize) -> VisualLayout:
        """Return the layout of an image of `size` (width, height)."""

    def _checked(self, picture: Picture) -> Image.Image | Frame:
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
        (left, top, right, bottom), (width, height) = self._processor.source_box(size), size
        # Patches may leave out the right and the bottom edge, less than a patch.
        share = self._side * self._tower.patch_size / self._tower.image_size
        layout = self._one_group(size, (left, top, left + share * (right - left), top + share * (bottom - top)))
        seen = (min(right, width) - max(left, 0.0)) / width * ((min(bottom, height) - max(top, 0.0)) / height)
        return replace(layout, seen_share=seen)
