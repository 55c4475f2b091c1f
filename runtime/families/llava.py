"""LLaVA-1.5: one square crop, one group of patch tokens in raster order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from sinkprune.contract.errors import VideoError
from sinkprune.contract.manifest import Manifest
from sinkprune.runtime.clip import Shown, Video
from sinkprune.runtime.grid_boxes import grid_boxes
from sinkprune.runtime.rotary import Positions
from sinkprune.runtime.square_processor import SquareProcessor


class Llava:
    """The image side of a LLaVA-1.5 bundle."""

    between_rows: str | None = None

    def __init__(self, manifest: Manifest) -> None:
        self._vision = manifest.vision
        self._width = manifest.language_model.hidden_size
        self._processor = SquareProcessor(manifest.processor)

    def visual_tokens(self, size: tuple[int, int]) -> int:
        """N, the same for every image."""
        tokens: int = self._vision["tokens"]
        return tokens

    def groups(self, size: tuple[int, int]) -> int:
        """The image."""
        return 1

    def unpruned_rows(self, size: tuple[int, int]) -> np.ndarray[Any, Any]:
        """Every token, in raster order."""
        return np.arange(self.visual_tokens(size))

    def most_unpruned_rows(self, most: int) -> int:
        """N."""
        return most

    def pictures(self, most: int) -> dict[str, tuple[int, int]]:
        """Every image has as many."""
        return {"image": (most, 1)}

    def preprocess(self, image: Image.Image) -> dict[str, np.ndarray[Any, Any]]:
        """`pixel_values` [1,3,image_size,image_size] fp32."""
        return {"pixel_values": self._processor(image)[None]}

    def shown(self, video: Video) -> Shown:
        """Raises `VideoError`."""
        raise VideoError("this bundle takes no video: its model is made for images. Give images, or another bundle.")

    def token_boxes(self, size: tuple[int, int]) -> np.ndarray[Any, Any]:
        """[N,4]: left, top, right, bottom of each patch in pixels of the image."""
        side = self._vision["image_size"] // self._vision["patch_size"]
        return grid_boxes(self._processor.source_box(size), side, side)

    def views(self, size: tuple[int, int]) -> list[range]:
        """One."""
        return [range(self.visual_tokens(size))]

    def positions(
        self, texts: Sequence[int], images: Sequence[tuple[tuple[int, int], np.ndarray[Any, Any]]]
    ) -> Positions:
        """Row by row, whatever an image's rows stand for."""
        return Positions.in_line(sum(texts) + sum(len(tokens) for _, tokens in images))

    def vision_sizes(self, n: int, groups: int) -> dict[str, tuple[int, int, int]]:
        """None: every image has the same size."""
        return {}

    def encode_flops(self, size: tuple[int, int], kept: int) -> int:
        """Matmul FLOPs of patches and computed CLIP blocks, and of the projector for `kept` tokens."""
        vision = self._vision
        n, d, m = vision["tokens"] + 1, vision["hidden_size"], vision["intermediate_size"]
        patches = 2 * vision["tokens"] * 3 * vision["patch_size"] ** 2 * d
        block = 2 * (4 * n * d * d + 2 * n * n * d + 2 * n * d * m)
        projector = 2 * kept * (d * self._width + self._width**2)
        return int(patches + vision["num_blocks"] * block + projector)
