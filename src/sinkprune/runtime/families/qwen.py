"""The runtime sides of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: layouts, positions and inputs."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sinkprune.contract.budgets import Share
from sinkprune.contract.errors import BundleError, ImageError, VideoError
from sinkprune.contract.flops import qwen_tower_flops
from sinkprune.contract.manifest import Manifest, Qwen3Tower, QwenTower
from sinkprune.contract.precision import DTYPES, Array
from sinkprune.contract.schedule import VisualLayout, grid_boxes
from sinkprune.runtime.families import Family, Fit, Rotary
from sinkprune.runtime.families.llava import PixelSize, check_settings, pixel_table
from sinkprune.runtime.families.qwen_processor import (
    Grid,
    Qwen3Processor,
    QwenProcessor,
    Sampling,
    Windows,
    end_to_end_indices,
    evenly_spaced_indices,
    sample_frames,
    window_index,
)
from sinkprune.runtime.media.frame import Picture, SampledFrames, Video, as_image

if TYPE_CHECKING:
    from sinkprune.runtime.frames import FrameForm, FramePlan


class Qwen25VL(Family):
    """The image side of a Qwen2.5-VL bundle.

    An image is one group, and each temporal patch of a clip is one. Tokens are in raster order.
    """

    between_rows: str | None = None
    _mlp_matrices = 3
    _mergers = 1
    _processing: type[QwenProcessor] = QwenProcessor
    _sampling: Sampling = staticmethod(evenly_spaced_indices)

    def __init__(self, manifest: Manifest) -> None:
        self._tower = manifest.tower(QwenTower)
        self._most_tokens = manifest.most_visual_tokens
        self._dtype = DTYPES[manifest.precision]
        check_settings(manifest.processor, self._dtype)
        self._settings = manifest.processor
        self._processor = self._processing(manifest.processor)
        for name in ("patch_size", "temporal_patch_size", "merge_size"):
            if manifest.processor[name] != getattr(self._tower, name):
                raise BundleError(
                    f"the bundle's `processor` has the {name} {manifest.processor[name]}, its `vision` "
                    f"{getattr(self._tower, name)}. Export it again."
                )
        self._video = manifest.processor.get("video")
        self._windowed_blocks = self._tower.num_blocks - len(self._tower.full_attention_blocks)
        head = self._tower.hidden_size // self._tower.num_heads
        # Half of a head rotates with the row, half with the column.
        self._rotary = Rotary(self._tower.rope_theta, head // 2, self._dtype)

    def layout(self, picture: Picture) -> VisualLayout:
        """Return a group for each temporal patch.

        Raises `ImageError` for a shape that the model cannot take, and for more tokens than the bundle's graphs take.
        """
        grid = self._processor.grid(picture.size)
        clip = picture if isinstance(picture, SampledFrames) else None
        times = self._times(grid.t, clip) if clip else np.arange(grid.t)
        width, height = picture.size[:2]
        layout = self._layout(grid, self._windows(grid), (width, height), times)
        if layout.tokens > self._most_tokens:
            raise ImageError(
                f"the image has {width}x{height} pixels, which make {layout.tokens} visual tokens; this bundle's "
                f"graphs take up to {self._most_tokens}. Scale it down, or export again with a larger --max-pixels."
            )
        return replace(layout, frame_indices=clip.indices, frames_at_rate=clip.at_rate) if clip else layout

    def inputs(self, picture: Picture) -> dict[str, Array]:
        """Return pixel patches, and index and rotary tables of their grid; raises `ImageError`."""
        grid = self._processor.grid(picture.size)
        shown = picture if isinstance(picture, SampledFrames) else as_image(picture)
        pixels = self._processor(shown).astype(self._dtype, copy=False)
        return {"pixel_values": pixels.reshape(grid.t, grid.h * grid.w, -1), **self.tables(picture)}

    def tables(self, picture: Picture) -> dict[str, Array]:
        """Return index and rotary tables of a picture's grid; raises `ImageError`."""
        grid = self._processor.grid(picture.size)
        axes = [self._rotary.tables(axis) for axis in self._patch_positions(grid)]
        cos, sin = (np.concatenate(table, axis=-1) for table in zip(*axes, strict=True))
        tables = {"cos": cos.repeat(grid.t, axis=0), "sin": sin.repeat(grid.t, axis=0)}
        windows = self._windows(grid)
        if windows is not None:
            tables |= {"window_index": windows.index, "patch_slot": windows.slot.reshape(grid.t, -1)}
        return tables

    def frame_form(self) -> FrameForm:
        from sinkprune.runtime.frames import patch_form

        return patch_form(pixel_table(self._settings, self._dtype), self._settings, self._most_tokens)

    def frame_plans(self, size: PixelSize) -> list[FramePlan]:
        from sinkprune.runtime.frames import Axis, PillowPlan

        grid, patch = self._processor.grid(size), self._tower.patch_size
        resized = grid.w * patch, grid.h * patch
        columns, rows = ((Axis(length, 0, length, new, 0, new),) for length, new in zip(size, resized, strict=True))
        return [PillowPlan(columns, rows, self._settings["resample"])]

    def check_video(self) -> None:
        self._video_settings()

    def sample_frames(self, video: Video) -> SampledFrames:
        """Return frames sampled by the processor's settings; raises `VideoError`."""
        return sample_frames(video, self._video_settings(), self._tower.temporal_patch_size, self._sampling)

    def fitted(self, fit: Fit) -> None:
        """Return None: the model sees whole pictures of any shape."""

    def smaller(self, share: Share) -> Qwen25VL:
        """Return a copy that resizes pictures to this share of their tokens."""
        other = copy(self)
        other._processor = self._processor.smaller(share)
        return other

    def largest(self) -> dict[str, VisualLayout]:
        """Return images, of one group, and clips, whose frames may have fewer tokens."""
        most, image = self._most_tokens, {"image": self._row_of_tokens(1, self._most_tokens)}
        if self._video is None:
            return image
        frame: int = self._video["most_tokens"]
        groups = -(-self._video["max_frames"] // self._tower.temporal_patch_size)
        clip = {"clip": self._row_of_tokens(groups, frame)}
        if frame == most:
            return clip
        return clip | image if groups > 1 else image

    def vision_sizes(self, tokens: int, groups: int) -> dict[str, tuple[int, int, int]]:
        """Return the patches of a frame, and windows: usually full ones, at most those of one-token-wide pictures."""
        unit, side = self._tower.merge_size**2, self._tower.window_side
        patches = {"patches": (unit, unit * tokens, unit * tokens)}
        if not self._windowed_blocks:
            return patches
        return {**patches, "windows": (1, groups * -(-tokens // side**2), groups * -(-tokens // side))}

    def _video_settings(self) -> dict[str, Any]:
        if self._video is None:
            raise VideoError("this bundle takes no video. Export the checkpoint again with --max-frames.")
        return self._video

    def _row_of_tokens(self, groups: int, tokens: int) -> VisualLayout:
        merge = self._tower.merge_size
        grid = Grid(groups, merge, merge * tokens)
        return self._layout(grid, self._windows(grid), (tokens, 1), np.arange(groups))

    def _layout(self, grid: Grid, windows: Windows | None, size: tuple[int, int], times: Array) -> VisualLayout:
        """Return the layout of a picture of `size` (width, height) whose temporal patches are at `times` [T].

        Text after a picture continues from its longer side, whatever a clip's length, as in transformers'
        `get_rope_index`.
        """
        merged = Grid(grid.t, grid.h // self._tower.merge_size, grid.w // self._tower.merge_size)
        n = merged.h * merged.w
        time, row, column = np.indices(merged).reshape(3, -1)
        return VisualLayout(
            size=size,
            groups=grid.t,
            tokens=n,
            unpruned_rows=np.arange(merged.patches),
            boxes=np.tile(grid_boxes((0, 0, *size), merged.h, merged.w), (grid.t, 1)),
            views=tuple(range(start, start + n) for start in range(0, n * grid.t, n)),
            places=np.stack([times[time], row, column]),
            extent=max(merged.h, merged.w),
            tower_flops=self._flops(grid, windows),
            projector_flops=0,
            seen_size=(grid.w * self._tower.patch_size, grid.h * self._tower.patch_size),
        )

    def _times(self, frames: int, clip: SampledFrames) -> Array:
        """Return [T] whole positions in time of a clip's temporal patches, `tokens_per_second` to a second.

        At a constant rate they are evenly spaced, as transformers spaces those of any clip. At a variable rate each
        has the time of its first frame.
        """
        together, each = self._tower.temporal_patch_size, np.float32(self._tower.tokens_per_second)
        if not clip.constant_rate:
            return (np.array(clip.seconds[::together], np.float32) * each).astype(np.int64)
        return (np.arange(frames, dtype=np.float32) * (each * np.float32(together / clip.size.fps))).astype(np.int64)

    def _flops(self, grid: Grid, windows: Windows | None) -> int:
        tower = self._tower
        pairs = len(tower.full_attention_blocks) * grid.t * (grid.h * grid.w) ** 2
        if windows is not None:
            filled = (windows.index >= 0).sum(axis=1)
            pairs += self._windowed_blocks * int((filled**2).sum())
        return qwen_tower_flops(tower, grid.patches, pairs, mlp_matrices=self._mlp_matrices, mergers=self._mergers)

    def _windows(self, grid: Grid) -> Windows | None:
        if not self._windowed_blocks:
            return None
        return window_index(grid, self._tower.merge_size, self._tower.window_side)

    def _patch_positions(self, grid: Grid) -> tuple[Array, Array]:
        """Return row and column of each patch of a frame, with the patches of a token next to each other."""
        merge, (_, h, w) = self._tower.merge_size, grid
        places = np.indices((h, w)).reshape(2, h // merge, merge, w // merge, merge)
        rows, columns = places.transpose(0, 1, 3, 2, 4).reshape(2, -1)
        return rows, columns


class Qwen2VL(Qwen25VL):
    """The image side of a Qwen2-VL bundle."""

    _mlp_matrices = 2

    def _times(self, frames: int, clip: SampledFrames) -> Array:
        return np.arange(frames)


_START, _END = "<|vision_start|>", "<|vision_end|>"


class Qwen3VL(Qwen25VL):
    """The image side of a Qwen3-VL bundle."""

    _mlp_matrices = 2
    _processing = Qwen3Processor
    _sampling = staticmethod(end_to_end_indices)

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest)
        tower = manifest.tower(Qwen3Tower)
        self._side, self._mergers = tower.position_side, 1 + len(tower.deepstack_blocks)

    def layout(self, picture: Picture) -> VisualLayout:
        """Return a group for each temporal patch, and for clips the texts with their times; raises `ImageError`."""
        layout = super().layout(picture)
        return replace(layout, texts=self._texts(picture)) if isinstance(picture, SampledFrames) else layout

    def tables(self, picture: Picture) -> dict[str, Array]:
        """Return rotary tables and learned positions of a picture's grid; raises `ImageError`."""
        index, weight = self._corners(self._processor.grid(picture.size))
        return {**super().tables(picture), "position_index": index, "position_weight": weight}

    def _times(self, frames: int, clip: SampledFrames) -> Array:
        """Return [T] zeros: each temporal patch has the positions of an image, because the time is text."""
        return np.zeros(frames, np.int64)

    def _texts(self, clip: SampledFrames) -> tuple[str, ...]:
        """Return texts with the mean time of each temporal patch, to a tenth of a second (Qwen3VLProcessor)."""
        together = self._tower.temporal_patch_size
        # The last frame fills an incomplete patch.
        seconds = [*clip.seconds, *clip.seconds[-1:] * (-len(clip.seconds) % together)]
        times = [(seconds[i] + seconds[i + together - 1]) / 2 for i in range(0, len(seconds), together)]
        stamps = [f"<{time:.1f} seconds>{_START}" for time in times]
        return (stamps[0], *(f"{_END}{stamp}" for stamp in stamps[1:]), _END)

    def _corners(self, grid: Grid) -> tuple[Array, Array]:
        """Return [patches,4] int64 and float: each patch's four neighbours in the position table, and their shares.

        Interpolation is bilinear. The corners of the table are those of the picture.
        """
        positions, sides = self._patch_positions(grid), (grid.h, grid.w)
        low, high, share = [], [], []
        for place, size in zip(positions, sides, strict=True):
            at = place.astype(np.float32) * np.float32(self._side - 1) / np.float32(max(size - 1, 1))
            low.append(np.floor(at).astype(np.int64))
            high.append(np.minimum(low[-1] + 1, self._side - 1))
            share.append(at - np.floor(at))
        rows, columns = (np.stack(ends, axis=1) for ends in zip(low, high, strict=True))
        down, right = (np.stack([1 - part, part], axis=1) for part in share)
        index = rows[:, :, None] * self._side + columns[:, None, :]
        weight = down[:, :, None] * right[:, None, :]
        return index.reshape(-1, 4), weight.reshape(-1, 4).astype(self._dtype)
