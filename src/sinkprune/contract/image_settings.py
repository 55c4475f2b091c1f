"""The fields of a bundle's `processor` that the runtime reads: image settings of transformers, with bounds."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from sinkprune.contract.checks.fields import Bounds
from sinkprune.contract.towers import Side

Number = int | float
Scale = Annotated[Number, Bounds(1e-6, 1e3)]
"""A factor or divisor of pixel values."""
Colours = Annotated[list[Annotated[Number, Bounds(-1e3, 1e3)]], Bounds(3, 3)]
Scales = Annotated[list[Scale], Bounds(3, 3)]
Pixels = Annotated[int, Bounds(1, 1 << 28)]
LeastPixels = Annotated[int, Bounds(1, 1 << 24)]
"""The number of pixels that smaller pictures are enlarged to."""
Frames = Annotated[int, Bounds(1, 1 << 20)]
FrameRate = Annotated[Number, Bounds(1e-3, 1e3)]
Filter = Annotated[int, Bounds(0, 5)]
"""One of Pillow's filters (`PIL.Image.Resampling`)."""
Pinpoints = Annotated[list[Annotated[list[Side], Bounds(2, 2)]], Bounds(0, 1000)]
"""Heights and widths that an image may be resized to."""


class PixelSettings(TypedDict):
    """Conversion of 8-bit pixels to floats."""

    do_rescale: bool
    rescale_factor: Scale
    do_normalize: bool
    image_mean: Colours
    image_std: Scales
    resample: Filter


class SquareSettings(PixelSettings):
    """Conversion of an image to a square."""

    do_resize: bool
    size: dict[str, Side]
    do_center_crop: bool
    crop_size: dict[str, Side]
    do_pad: bool


class PaddedSettings(PixelSettings):
    """Conversion of an image to a part of a square."""

    size: dict[str, Side]
    pad_size: dict[str, Side]


LeRobotResize = Literal["resize_with_pad_torch", "resize_with_pad"]
"""LeRobot's functions that turn an image into a part of a square: in its middle, or at its right and lower edges."""


class LeRobotSettings(PixelSettings):
    """Conversion of an image to a part of a square by LeRobot."""

    image_processor_type: LeRobotResize
    pad_size: dict[str, Side]


class TileSettings(SquareSettings):
    """Conversion of an image to several squares."""

    image_grid_pinpoints: Pinpoints


class VideoSettings(TypedDict):
    """The choice of a clip's frames, and their size."""

    min_pixels: LeastPixels
    max_pixels: Pixels
    most_tokens: Pixels
    fps: FrameRate
    min_frames: Frames
    max_frames: Frames


class _Video(TypedDict, total=False):
    video: VideoSettings | None


class PatchSettings(PixelSettings, _Video):
    """Conversion of an image of any size, and with `video` of a clip, to patches."""

    min_pixels: LeastPixels
    max_pixels: Pixels
    patch_size: Side
    temporal_patch_size: Side
    merge_size: Side
