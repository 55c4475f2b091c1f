"""The processors of Qwen's models in transformers, with Pillow and numpy only, number for number."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypedDict

import numpy as np
from PIL import Image

from sinkprune.contract.budgets import UNPRUNED, Share
from sinkprune.contract.checks import counted as in_words
from sinkprune.contract.checks import from_json
from sinkprune.contract.errors import ImageError, PruningError, VideoError
from sinkprune.contract.manifest import FrameRate, Frames, LeastPixels, Pixels, PixelSettings, Side
from sinkprune.contract.precision import Array
from sinkprune.runtime.families.llava import PixelSize, pixel_values
from sinkprune.runtime.media.clip import check_rate
from sinkprune.runtime.media.frame import ClipSize, SampledFrames, Video

WHOLE = Share(1, 1)
# The model's own limit (smart_resize).
_MAX_ASPECT_RATIO = 200
_MOST_PRECISION = 22
# Rows at a time, so that a step's data stays in the cache
_ROWS = 32
_TRANSPOSE = Image.Transpose.TRANSPOSE


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


class Grid(NamedTuple):
    """The number of patches of a picture along time, height and width."""

    t: int
    h: int
    w: int

    @property
    def patches(self) -> int:
        """The number of all patches: t * h * w."""
        return self.t * self.h * self.w


class QwenProcessor:
    """Resizes pictures and cuts them into patches, by the `settings` of preprocessor_config.json.

    Qwen2VLImageProcessor for images, and Qwen2VLVideoProcessor for clips.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Check `settings`; raises `SchemaError` if they are malformed."""
        from_json(PatchSettings, settings, "$.processor")
        self._settings, self._share = settings, WHOLE

    def smaller(self, share: Share) -> QwenProcessor:
        """Return a copy that resizes each image or frame once, to this share of its merged tokens."""
        other = copy(self)
        other._share = share
        return other

    def __call__(self, picture: Image.Image | SampledFrames) -> Array:
        """Return [patches, 3 * temporal_patch_size * patch_size**2] fp32 of an RGB image or the frames of a clip.

        Merged tokens are in raster order, frame after frame, and the patches of each are next to each other. An
        image, and the last of an odd number of frames, fills every frame of its temporal patch.
        """
        grid, settings = self.grid(picture.size), self._settings
        patch, merge, together = (settings[f"{name}_size"] for name in ("patch", "merge", "temporal_patch"))
        size = (grid.w * patch, grid.h * patch)
        if isinstance(picture, SampledFrames):
            frames = [*map(TorchvisionResize(picture.size[:2], size), picture.frames)]
        else:
            frames = [np.asarray(picture.resize(size, Image.Resampling(settings["resample"])))]
        frames += frames[-1:] * (grid.t * together - len(frames))
        # One by one, because intermediate values have 64 bits.
        values = np.stack([pixel_values(frame, settings) for frame in frames])
        blocks = values.reshape(grid.t, together, grid.h // merge, merge, patch, grid.w // merge, merge, patch, 3)
        return blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(grid.patches, -1)

    def grid(self, size: PixelSize | ClipSize) -> Grid:
        """Return the patches of an image of `size` (width, height), or of a clip; raises `ImageError`.

        Both sides become multiples of a merged token's side, with min_pixels to max_pixels in all. The aspect ratio
        is kept as far as possible (smart_resize).
        """
        if isinstance(size, ClipSize):
            return self._shared(self._clip_grid(size, self._settings["video"]))
        return self._shared(self._resized(size, self._settings["min_pixels"], self._settings["max_pixels"]))

    def _shared(self, grid: Grid) -> Grid:
        """Return the largest grid of about this shape with at most the processor's share of its merged tokens.

        Raises `PruningError` for a grid of one token, which has no smaller one.
        """
        if self._share == WHOLE:
            return grid
        merge = self._settings["merge_size"]
        rows, columns = grid.h // merge, grid.w // merge
        tokens = self._share.of(rows * columns)
        if tokens == rows * columns:
            raise PruningError(
                f"pruning was asked for and nothing was pruned: the image has {in_words(tokens, 'visual token')} "
                f"and cannot be made smaller. Use budget '{UNPRUNED}'."
            )
        exact = math.sqrt(tokens * rows / columns)
        heights = (min(tokens, max(1, rounded)) for rounded in (math.floor(exact), math.ceil(exact)))
        shapes = [(height, min(tokens // height, columns)) for height in heights]
        rows, columns = max(shapes, key=math.prod)
        return Grid(grid.t, rows * merge, columns * merge)

    def _clip_grid(self, size: ClipSize, limits: Mapping[str, Any]) -> Grid:
        """Return the grid of a clip. The `limits` hold for each frame."""
        frame = self._resized((size.width, size.height), limits["min_pixels"], limits["max_pixels"])
        return frame._replace(t=-(-size.frames // self._settings["temporal_patch_size"]))

    def _resized(self, size: PixelSize, least: int, most: int, frames: int = 1, counted: int = 1) -> Grid:
        """Return the grid of one of `frames` frames, with `least` to `most` pixels in `counted` frames together."""
        width, height = size
        if 0 in size:
            raise ImageError(f"the image has {width}x{height} pixels, expected at least 1x1.")
        if max(size) / min(size) > _MAX_ASPECT_RATIO:
            raise ImageError(
                f"the image has {width}x{height} pixels; the model takes aspect ratios up to {_MAX_ASPECT_RATIO}:1. "
                "Crop it."
            )
        settings, patch = self._settings, self._settings["patch_size"]
        unit = patch * settings["merge_size"]
        rows, columns = round(height / unit), round(width / unit)
        if counted * rows * columns * unit**2 > most:
            shrink = math.sqrt((frames * height * width) / most)
            rows = max(1, math.floor(height / shrink / unit))
            columns = max(1, math.floor(width / shrink / unit))
        elif counted * rows * columns * unit**2 < least:
            grow = math.sqrt(least / (frames * height * width))
            rows, columns = math.ceil(height * grow / unit), math.ceil(width * grow / unit)
        merge = settings["merge_size"]
        return Grid(1, rows * merge, columns * merge)


class Qwen3Processor(QwenProcessor):
    """Qwen2VLImageProcessor for images, and Qwen3VLVideoProcessor for clips.

    In the settings `video`, `min_pixels` holds for all frames of a clip together, and `max_pixels` for each.
    """

    def _clip_grid(self, size: ClipSize, limits: Mapping[str, Any]) -> Grid:
        together, patch, merge = (self._settings[f"{name}_size"] for name in ("temporal_patch", "patch", "merge"))
        unit = patch * merge
        width, height, frames = size.width, size.height, max(size.frames, together)
        if 0 < min(width, height) < unit:
            scale = max(unit / height, unit / width)
            width, height = int(width * scale), int(height * scale)
        # The model's own processor rounds the number of temporal patches to the nearest even one. Frames of some odd
        # clips would then be a quarter larger than the graphs allow.
        counted = max(frames, round(frames / together) * together)
        frame = self._resized((width, height), limits["min_pixels"], frames * limits["max_pixels"], frames, counted)
        return frame._replace(t=-(-size.frames // together))


class TorchvisionResize:
    """Resizes pictures of one size (width, height) to another, as torchvision does.

    Columns first, then rows, each rounded to 8 bits, by weights of 16 bits (PyTorch, UpSampleKernel.cpp,
    `_compute_index_ranges_int16_weights`). No maintained library without torch gives these bits: Pillow's weights
    are finer, which changes some percent of the values, and OpenCV's bicubic does not antialias.
    """

    def __init__(self, size: PixelSize, resized: PixelSize) -> None:
        """Compute the weights from `size` to `resized`."""
        self._columns, self._rows = (_weights(*lengths) for lengths in zip(size, resized, strict=True))

    def __call__(self, picture: Image.Image) -> Array:
        columns = _resize_rows(np.asarray(picture.transpose(_TRANSPOSE)), self._columns)
        return _resize_rows(np.asarray(Image.fromarray(columns).transpose(_TRANSPOSE)), self._rows)


class _Weights(NamedTuple):
    values: Array
    """[new,old] in a type that holds every sum of weighted pixels exactly."""
    starts: Array
    """[new] the first old row with a share."""
    ends: Array
    """[new] the row after the last with a share."""


def _weights(length: int, resized: int) -> _Weights:
    scale = length / resized
    stretch = max(scale, 1.0)
    centers = scale * (np.arange(resized) + 0.5)
    starts = np.maximum((centers - 2 * stretch + 0.5).astype(np.int64), 0)
    ends = np.minimum((centers + 2 * stretch + 0.5).astype(np.int64), length)
    taps = int((ends - starts).max())
    places = starts[:, None] + np.arange(taps)
    shares = np.where(places < ends[:, None], _cubic((places - centers[:, None] + 0.5) * (1 / stretch)), 0)
    shares /= shares.sum(axis=1, keepdims=True)
    precision, most = 0, shares.max()
    while precision < _MOST_PRECISION and int(0.5 + most * 2 ** (precision + 1)) < 2**15:
        precision += 1
    whole = np.trunc(shares * 2**precision + np.copysign(0.5, shares))
    largest_sum = 255 * np.abs(whole).sum(axis=1).max() + 2 ** (precision - 1)
    values = np.zeros((resized, length + taps), np.float32 if largest_sum < 2**24 else np.float64)
    values[np.arange(resized)[:, None], places] = whole / 2**precision
    return _Weights(values[:, :length], starts, ends)


def _cubic(x: Array) -> Array:
    """Keys' cubic convolution with a = -1/2, term by term as PyTorch writes it."""
    x = np.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _resize_rows(pixels: Array, weights: _Weights) -> Array:
    """Return [new,width,3] uint8 of `pixels` [old,width,3] uint8."""
    values, starts, ends = weights
    new, old = values.shape
    if new == old:
        # All weights would be 0 and 1.
        return pixels
    resized = np.empty((new, *pixels.shape[1:]), np.uint8)
    for start in range(0, new, _ROWS):
        end = min(start + _ROWS, new)
        used = slice(starts[start], ends[end - 1])
        sums = np.tensordot(values[start:end, used], pixels[used].astype(values.dtype), axes=1)
        # The cast rounds towards zero, which is down, because clip removes negative values.
        resized[start:end] = np.clip(sums + values.dtype.type(0.5), 0, 255)
    return resized


@dataclass(frozen=True)
class Windows:
    """Index tables from patches to windows of a vision block, and back. Windows at an edge have empty slots."""

    index: Array
    """[W,slots] int64: the patch in each slot, -1 in empty slots."""
    slot: Array
    """[patches] int64: each patch's slot, numbered through all windows."""


# The layout of a picture counts them, and its inputs have them.
@lru_cache(2)
def window_index(grid: Grid, merge: int, side: int) -> Windows:
    """Return windows of `side` x `side` merged tokens over each frame of `grid`, from its top left corner.

    The `merge` x `merge` patches of a token are next to each other, as in the output of `QwenProcessor`.
    """
    rows, columns = grid.h // merge, grid.w // merge
    down, across = -(-rows // side), -(-columns // side)
    units = np.full((grid.t, down * side, across * side), -1)
    units[:, :rows, :columns] = np.arange(grid.t * rows * columns).reshape(grid.t, rows, columns)
    units = units.reshape(grid.t, down, side, across, side).transpose(0, 1, 3, 2, 4).reshape(-1, side * side, 1)
    index = np.where(units < 0, -1, units * merge**2 + np.arange(merge**2)).reshape(-1, (side * merge) ** 2)
    filled = np.flatnonzero(index.ravel() >= 0)
    slot = np.empty(grid.patches, np.int64)
    slot[index.ravel()[filled]] = filled
    return Windows(index.astype(np.int64), slot)


def evenly_spaced_indices(count: int, fps: float, settings: Mapping[str, Any], together: int) -> list[int]:
    """Return which of `count` frames a model sees: evenly spaced, `settings["fps"]` a second within the limits.

    Qwen2VLVideoProcessor.sample_frames, in the same arithmetic. Of fewer than `together` frames all are used, but at
    most `settings["max_frames"]`.
    """
    most = math.floor(min(settings["max_frames"], count) / together) * together
    wanted = min(max(count / fps * settings["fps"], settings["min_frames"]), most, count)
    number = math.floor(wanted / together) * together
    if number == 0:
        return list(range(min(count, settings["max_frames"])))
    # transformers' step may round down, and its range then has one more element, after the last frame.
    steps = np.arange(number) * (count / number)
    return [int(step) for step in steps.astype(np.float32)]


def end_to_end_indices(count: int, fps: float, settings: Mapping[str, Any], together: int) -> list[int]:
    """Return which of `count` frames a model sees: evenly spaced from the first to the last, within the limits.

    Qwen3VLVideoProcessor.sample_frames, in the same arithmetic.
    """
    wanted = min(max(int(count / fps * settings["fps"]), settings["min_frames"]), settings["max_frames"], count)
    return [int(index) for index in np.linspace(0, count - 1, wanted).round()]


def nearest_frames(times: Sequence[float], indices: Sequence[int]) -> list[int]:
    """Return the frames nearest to where frames at a constant rate would have the numbers `indices`.

    `times` are the seconds of each of several frames after the first. No frame is returned twice.
    """
    ascending, count = np.array(times), np.arange(len(indices))
    wanted = np.array(indices) * (times[-1] / (len(times) - 1))
    after = np.searchsorted(ascending, wanted).clip(1, len(times) - 1)
    nearest = np.where(wanted - ascending[after - 1] <= ascending[after] - wanted, after - 1, after)
    distinct = np.maximum.accumulate(nearest - count) + count
    return [int(index) for index in np.minimum(distinct, len(times) - len(indices) + count)]


Sampling = Callable[[int, float, Mapping[str, Any], int], list[int]]
"""`evenly_spaced_indices`, or a function with the same arguments."""


def sample_frames(
    video: Video, settings: Mapping[str, Any], together: int, sampling: Sampling = evenly_spaced_indices
) -> SampledFrames:
    """Return the frames of `video` that a model sees by a processor's `settings`, `together` of them to a token.

    Raises `VideoError` for a video without frames, without a rate, or with frames of several sizes.
    """
    if video.count < 1:
        raise VideoError("the video has no frames. Give one with a picture in it.")
    check_rate("video", video.fps)
    indices = sampling(video.count, video.fps, settings, together)
    if video.times is not None:
        indices = nearest_frames(video.times, indices)
    frames = video.read(indices)
    sizes = {frame.size for frame in frames}
    if len(sizes) > 1:
        raise VideoError(f"the frames have different sizes, {sorted(sizes)}; expected one. Scale them to one size.")
    (width, height), fps = frames[0].size, len(indices) / video.count * video.fps
    seconds = tuple(index / video.fps if video.times is None else video.times[index] for index in indices)
    at_rate = max(1, min(video.count, int(video.count / video.fps * settings["fps"])))
    size = ClipSize(width, height, len(indices), fps)
    return SampledFrames(frames, size, seconds, at_rate, tuple(indices), video.times is None)
