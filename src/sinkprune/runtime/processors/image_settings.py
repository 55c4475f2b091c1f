"""What a bundle's `processor` may hold, as far as it is read: transformers' settings of images, with bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from sinkprune.contract.files.schema import Bounds, SchemaError, from_json
from sinkprune.contract.towers import Side

Scale = Annotated[float, Bounds(1e-6, 1e3)]
"""By what pixels are multiplied or divided."""
Shift = Annotated[float, Bounds(-1e3, 1e3)]
Pixels = Annotated[int, Bounds(1, 1 << 28)]
LeastPixels = Annotated[int, Bounds(1, 1 << 24)]
"""To how many pixels smaller pictures are enlarged."""
Frames = Annotated[int, Bounds(1, 1 << 20)]
Filter = Annotated[int, Bounds(0, 5)]
"""One of Pillow's filters (`PIL.Image.Resampling`)."""


@dataclass(frozen=True)
class PixelSettings:
    """How 8-bit pixels become floats."""

    do_rescale: bool
    rescale_factor: Scale
    do_normalize: bool
    image_mean: tuple[Shift, ...]
    image_std: tuple[Scale, ...]
    resample: Filter

    def __post_init__(self) -> None:
        for name in ("image_mean", "image_std"):
            if len(getattr(self, name)) != 3:
                raise SchemaError(f"$.{name}: found {len(getattr(self, name))} numbers, expected 3")


@dataclass(frozen=True)
class SquareSettings(PixelSettings):
    """How an image becomes a square."""

    do_resize: bool
    size: dict[str, Side]
    do_center_crop: bool
    crop_size: dict[str, Side]
    do_pad: bool


@dataclass(frozen=True)
class TileSettings(SquareSettings):
    """How an image becomes several squares."""

    image_grid_pinpoints: tuple[tuple[Side, ...], ...]


@dataclass(frozen=True)
class VideoSettings:
    """Which frames of a clip are shown, and how large."""

    min_pixels: LeastPixels
    max_pixels: Pixels
    most_tokens: Pixels
    fps: Annotated[float, Bounds(1e-3, 1e3)]
    min_frames: Frames
    max_frames: Frames


@dataclass(frozen=True)
class PatchSettings(PixelSettings):
    """How an image of any size becomes patches."""

    min_pixels: LeastPixels
    max_pixels: Pixels
    patch_size: Side
    temporal_patch_size: Side
    merge_size: Side
    video: VideoSettings | None


def check_image_settings(kind: type, settings: Mapping[str, Any]) -> None:
    """Refuse settings that lack a field of the dataclass `kind`, or hold something else in it than it may.

    What `kind` does not name is nobody's concern, and a `video` that is left out is none. Raises `SchemaError`.
    """
    named = {field.name for field in fields(kind)}
    read = {name: value for name, value in settings.items() if name in named}
    from_json(kind, {"video": None, **read} if "video" in named else read, "$.processor")
