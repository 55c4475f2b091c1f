"""The visual tokens of a picture: their number, order and places."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sinkprune.contract.precision import Array


@dataclass(frozen=True, eq=False)
class VisualLayout:
    """An image or a clip as `groups` groups of `tokens` visual tokens, made by the family's module.

    Tokens are numbered through all groups: G*N of them.
    """

    size: tuple[int, int]
    """Width and height of the picture, in pixels."""
    groups: int
    """G: the groups that the sanitizer treats separately: an image, its tiles, or the temporal patches of a clip."""
    tokens: int
    """N: the number of visual tokens of each group."""
    unpruned_rows: Array
    """[V] int64: the token of each row of the unpruned prompt; -1 at the end of a line."""
    boxes: Array
    """[G*N,4] float: left, top, right, bottom of each token, in pixels of the picture."""
    views: tuple[range, ...]
    """The tokens that cover each frame or image once, for drawing."""
    places: Array | None
    """[A,G*N] int64: position ids along A axes, relative to the picture's first row; None if a position is a row's
    number in the prompt."""
    extent: int
    """The position of the next text, relative to the picture's first row. Unused if `places` is None."""
    tower_flops: int
    """Matmul FLOPs of the vision tower on all groups."""
    projector_flops: int
    """Matmul FLOPs of the projector for one token; 0 without a projector."""
    seen_share: float = 1.0
    """The share of the picture's area in the model's input; 1 for the whole picture."""
    seen_size: tuple[int, int] | None = None
    """Width and height in pixels at which the model sees the picture, in families that keep its shape; else None."""
    frame_indices: tuple[int, ...] = ()
    """The number in the clip of each frame that the model sees; empty for an image."""
    frames_at_rate: int = 0
    """How many the model's rate takes of the clip, without the bundle's limit; 0 for an image."""
    texts: tuple[str, ...] = ()
    """The texts around the groups in the prompt, from the model's template: one before each group and one after the
    last. Empty for adjacent groups. With texts, `places` and `extent` are relative to the first row of each group."""

    @property
    def frames(self) -> int:
        """Return how many frames of a clip the model sees; 1 for an image."""
        return max(1, len(self.frame_indices))

    @property
    def parts(self) -> int:
        """Return the number of places in a prompt that the picture takes."""
        return max(1, len(self.texts) - 1)

    @property
    def all_tokens(self) -> int:
        """Return G*N, the number of visual tokens before pruning."""
        return self.groups * self.tokens


@lru_cache(8)
def grid_boxes(area: tuple[float, float, float, float], rows: int, columns: int) -> Array:
    """Return [rows*columns,4]: the equal boxes that tile `area`, in raster order.

    A box and the area are left, top, right, bottom. The array is read-only: the next picture of this size has the
    same.
    """
    left, top, right, bottom = area
    xs, ys = np.linspace(left, right, columns + 1), np.linspace(top, bottom, rows + 1)
    tops, lefts = np.meshgrid(ys[:-1], xs[:-1], indexing="ij")
    bottoms, rights = np.meshgrid(ys[1:], xs[1:], indexing="ij")
    boxes: Array = np.stack([lefts, tops, rights, bottoms], axis=-1).reshape(-1, 4)
    boxes.flags.writeable = False
    return boxes
