"""InternVL's pictures: the tiles of an image and a thumbnail, or the frames of a clip, one group each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from PIL import Image

from sinkprune.contract.checks import from_json
from sinkprune.contract.errors import ImageError, VideoError
from sinkprune.contract.manifest import Frames, InternVLTower, Manifest, PixelSettings, Tiles
from sinkprune.contract.precision import Array
from sinkprune.contract.schedule import VisualLayout, grid_boxes
from sinkprune.runtime.families import Fit
from sinkprune.runtime.families.llava import PixelSize, SquarePictures, check_settings, pixel_values
from sinkprune.runtime.families.qwen_processor import TorchvisionResize, sample_frames
from sinkprune.runtime.media.frame import ClipSize, Picture, SampledFrames, Video, as_image

if TYPE_CHECKING:
    from sinkprune.runtime.frames import FrameForm, FramePlan

_Area = tuple[float, float, float, float]
_START, _END = "<img>", "</img>"


class ClipSettings(PixelSettings):
    """Conversion of a clip's frames to squares."""

    max_frames: Frames


class _Clip(TypedDict, total=False):
    video: ClipSettings | None


class GridSettings(PixelSettings, _Clip):
    """Conversion of an image to a grid of squares, and with `video` of a clip's frames to one square each."""

    min_patches: Tiles
    max_patches: Tiles


class TilesProcessor:
    """Cuts images into squares of `side` pixels, by the `settings` of preprocessor_config.json.

    GotOcr2ImageProcessor with `crop_to_patches`, as InternVLProcessor calls it, and InternVLVideoProcessor for clips.
    """

    def __init__(self, settings: Mapping[str, Any], side: int) -> None:
        """Check `settings`; raises `SchemaError` if they are malformed."""
        from_json(GridSettings, settings, "$.processor")
        self._settings, self._side = settings, side
        least, most = settings["min_patches"], settings["max_patches"]
        grids = [(columns, rows) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
        self._grids = sorted((grid for grid in grids if prod(grid) >= least), key=prod)

    def __call__(self, image: Image.Image) -> Array:
        """Return [G,3,side,side] fp32 of an RGB image: its tiles in raster order, then the whole image if several."""
        side, resample = self._side, Image.Resampling(self._settings["resample"])
        columns, rows = self.grid(image.size)
        shown = image.resize((columns * side, rows * side), resample)
        corners = ((x, y) for y in range(0, shown.height, side) for x in range(0, shown.width, side))
        views = [shown.crop((x, y, x + side, y + side)) for x, y in corners]
        views += [image.resize((side, side), resample)] if len(views) > 1 else []
        return _stacked([np.asarray(view) for view in views], self._settings)

    def of_clip(self, clip: SampledFrames) -> Array:
        """Return [G,3,side,side] fp32 of the whole frames."""
        resized = map(TorchvisionResize(clip.size[:2], (self._side, self._side)), clip.frames)
        return _stacked([*resized], self._settings["video"])

    def frame_plans(self, size: PixelSize) -> list[FramePlan]:
        """Return what a call computes of an image of `size`: the tiles, then the whole image; raises `ImageError`."""
        from sinkprune.runtime.frames import Axis, PillowPlan

        def plan(grid: tuple[int, int]) -> PillowPlan:
            columns, rows = (
                tuple(
                    Axis(length, 0, length, count * self._side, place * self._side, self._side)
                    for place in range(count)
                )
                for length, count in zip(size, grid, strict=True)
            )
            return PillowPlan(columns, rows, self._settings["resample"])

        grid = self.grid(size)
        return [plan(each) for each in dict.fromkeys((grid, (1, 1)))]

    def grid(self, size: PixelSize) -> tuple[int, int]:
        """Return the columns and rows of tiles of an image of `size`: of those with the nearest ratio of sides the
        last that has less than twice the image's pixels.
        """
        if 0 in size:
            raise ImageError(f"the image has {size[0]}x{size[1]} pixels, expected at least 1x1.")
        ratio, area = size[0] / size[1], prod(size)
        best, nearest = self._grids[0], float("inf")
        for grid in self._grids:
            distance = abs(ratio - grid[0] / grid[1])
            if distance < nearest or (distance == nearest and area > 0.5 * self._side**2 * prod(grid)):
                best, nearest = grid, distance
        return best


def _stacked(views: Sequence[Array], settings: Mapping[str, Any]) -> Array:
    """Return [G,3,height,width] fp32 of uint8 pixels [height,width,3]."""
    values = np.stack([pixel_values(view, settings) for view in views])
    return np.ascontiguousarray(values.transpose(0, 3, 1, 2))


def middle_indices(count: int, fps: float, settings: Mapping[str, Any], together: int) -> list[int]:
    """Return which of `count` frames a model sees: all, or the middles of `max_frames` equal parts.

    InternVLVideoProcessor.sample_frames.
    """
    step = count / min(count, settings["max_frames"])
    middles = step / 2 + np.arange(min(count, settings["max_frames"])) * step
    return [int(index) for index in middles.astype(np.float32)]


class InternVL(SquarePictures):
    """The image side of an InternVL bundle."""

    _processor: TilesProcessor
    no_video = "this bundle takes no video. Export the checkpoint again with --max-frames."

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest, manifest.tower(InternVLTower))
        self._processor = TilesProcessor(manifest.processor, self._tower.image_size)
        self._video = manifest.processor.get("video")
        if self._video is not None:
            check_settings(self._video, self._dtype)
        joined, width = self._tower.hidden_size * self._tower.patches_per_token, manifest.language_model.hidden_size
        self._projector_flops = 2 * (joined * width + width**2)

    def layout(self, picture: Picture) -> VisualLayout:
        """Return a group for each tile, or for each frame of a clip with the texts that number them."""
        if not isinstance(picture, SampledFrames):
            return self._layout(picture.size)
        layout = self._frames(picture.size)
        return replace(layout, frame_indices=picture.indices, frames_at_rate=picture.at_rate)

    def inputs(self, picture: Picture) -> dict[str, Array]:
        """Return `pixel_values` [G,3,image_size,image_size]; raises `ImageError`."""
        if isinstance(picture, SampledFrames):
            pixels = self._processor.of_clip(picture)
        else:
            pixels = self._processor(as_image(picture))
        return {"pixel_values": pixels.astype(self._dtype, copy=False)}

    def frame_form(self) -> FrameForm:
        return self._square_form(views=self._settings["max_patches"])

    def frame_plans(self, size: PixelSize) -> list[FramePlan]:
        return self._processor.frame_plans(size)

    def check_video(self) -> None:
        self._video_settings()

    def sample_frames(self, video: Video) -> SampledFrames:
        """Return all frames, or as many as the bundle takes; raises `VideoError`."""
        return sample_frames(video, {**self._video_settings(), "fps": video.fps}, 1, middle_indices)

    def fitted(self, fit: Fit) -> None:
        """Return None: the tiles show whole images of any shape."""

    def largest(self) -> dict[str, VisualLayout]:
        """Return an image of the most tiles, or a clip if it has more frames than that."""
        side, frames = self._tower.image_size, self._video["max_frames"] if self._video else 0
        image = self._layout((side * self._settings["max_patches"], side))
        return (
            {"clip": self._frames(ClipSize(side, side, frames, 1.0))} if frames > image.groups else {"image": image}
        )

    def _video_settings(self) -> dict[str, Any]:
        if self._video is None:
            raise VideoError(self.no_video)
        return self._video

    def _layout(self, size: PixelSize) -> VisualLayout:
        columns, rows = self._processor.grid(size)
        width, height = size[0] / columns, size[1] / rows
        areas: list[_Area] = [
            (x * width, y * height, (x + 1) * width, (y + 1) * height) for y in range(rows) for x in range(columns)
        ]
        ends = [len(areas)]
        if len(areas) > 1:
            areas.append((0.0, 0.0, float(size[0]), float(size[1])))
            ends.append(len(areas))
        return self._groups(size, areas, ends, (_START, _END))

    def _frames(self, size: ClipSize) -> VisualLayout:
        areas = [(0.0, 0.0, float(size.width), float(size.height))] * size.frames
        first, *later = (f"Frame{number + 1}: {_START}" for number in range(size.frames))
        texts = (first, *(f"{_END}\n{text}" for text in later), _END)
        return self._groups(size[:2], areas, range(1, size.frames + 1), texts)

    def _groups(
        self, size: PixelSize, areas: Sequence[_Area], ends: Sequence[int], texts: tuple[str, ...]
    ) -> VisualLayout:
        """Return the layout of groups that show the `areas`. Views end at the groups `ends`."""
        n, starts = self._tower.tokens, (0, *ends)
        boxes = np.concatenate([grid_boxes(area, self._side, self._side) for area in areas])
        views = [range(start * n, end * n) for start, end in pairwise(starts)]
        return replace(self._in_line(size, len(areas), np.arange(len(areas) * n), boxes, views), texts=texts)
