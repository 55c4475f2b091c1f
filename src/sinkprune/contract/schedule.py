"""How many visual tokens of a picture leave the tower, and reach each layer at a budget.

This module counts survivors on the host, and `sinkprune.export.pruning.plan` in graphs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np

from sinkprune.contract.budgets import Counts, Plan
from sinkprune.contract.manifest import Manifest, SiglipTower, SquareTower
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

    @cached_property
    def parts(self) -> int:
        """Return the number of places in a prompt that the picture takes."""
        return max(1, len(self.texts) - 1)

    @cached_property
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


@dataclass(frozen=True)
class PictureSchedule:
    """The visual rows of one picture that survive each pruning layer."""

    rows: int
    """Rows before the first decoder layer."""
    after: dict[int, int]
    """The rows that survive each pruning layer (0-based)."""
    counts: Counts | None = None
    """What the sanitizer keeps of each group; None if nothing prunes."""
    groups: int = 1
    """The number of groups of the sanitizer."""

    @classmethod
    def of(cls, counts: Counts, groups: int, cuts: Sequence[int]) -> PictureSchedule:
        """Return the schedule of `groups` groups with `counts` each, whose stages follow the layers `cuts`."""
        rows = left = groups * counts.kept
        after = {}
        for cut, stage in zip(cuts, counts.stages, strict=True):
            # A stage that may keep more rows than are left drops nothing (method.md section 2).
            after[cut] = left = min(left, stage)
        return cls(rows, after, counts, groups)

    def reaching(self, layer: int) -> int:
        """Return the rows that decoder layer `layer` (0-based) runs on; `num_layers` stands for the head."""
        return min([self.rows, *(left for cut, left in self.after.items() if cut < layer)])

    def mean(self, num_layers: int) -> Fraction:
        """Return the mean number of rows over the layers (method.md section 5)."""
        return Fraction(sum(map(self.reaching, range(num_layers))), num_layers)


@dataclass(frozen=True)
class Schedule:
    """What a method keeps at a budget, for all pictures of a request."""

    budget: str
    plan: Plan | None
    """The graphs of the method; None for the unpruned engines."""
    pictures: tuple[PictureSchedule, ...]

    @cached_property
    def rows(self) -> int:
        """Return the visual rows of all pictures before the first decoder layer."""
        return sum(picture.rows for picture in self.pictures)

    def reaching(self, layer: int) -> int:
        """Return the visual rows of all pictures that decoder layer `layer` (0-based) runs on.

        `num_layers` stands for the head.
        """
        return sum(picture.reaching(layer) for picture in self.pictures)

    def per_layer(self, num_layers: int) -> list[int]:
        """Return the visual rows of all pictures for each of `num_layers` decoder layers."""
        return [self.reaching(layer) for layer in range(num_layers)]

    @cached_property
    def kept(self) -> Mapping[int, Sequence[int]]:
        """Return the rows of each picture that survive, by pruning layer (0-based)."""
        cuts = self.plan.cuts if self.plan else ()
        return {cut: [picture.after[cut] for picture in self.pictures] for cut in cuts}


def schedule(manifest: Manifest, method: str, budget: str, layouts: Sequence[VisualLayout]) -> Schedule:
    """Return the schedule of `method` at `budget` for pictures of these layouts. Raises `BudgetError`."""
    return scheduled(budget, manifest.plan(method, budget), layouts)


def scheduled(budget: str, plan: Plan | None, layouts: Sequence[VisualLayout]) -> Schedule:
    """Return the schedule of the `plan` of a `budget` for pictures of these layouts."""
    if plan is None:
        pictures = tuple(PictureSchedule(len(layout.unpruned_rows), {}) for layout in layouts)
        return Schedule(budget, None, pictures)
    kept = (plan.keeps(layout.tokens, layout.groups) for layout in layouts)
    return Schedule(budget, plan, tuple(PictureSchedule.of(counts, groups, plan.cuts) for counts, groups in kept))


def merges_of(tower: SquareTower) -> dict[int, int]:
    """Return how many tokens each block (0-based) of a merging tower merges, after its attention.

    iLLaVA merges 92 of 576 tokens in each of blocks 5 to 8 of 24. Other towers merge the same share of their tokens,
    at the same part of their depth. A block merges at most every other token. Empty for a tower whose salience is
    that of a block before these.
    """
    first, count = (10 * tower.num_blocks + 24) // 48, -(-tower.num_blocks // 6)
    merges, left = {}, tower.tokens
    for block in range(first, first + count):
        merges[block] = min(tower.tokens * 4 * 92 // (576 * count), left // 2)
        left -= merges[block]
    last = tower.salience_block if isinstance(tower, SiglipTower) else tower.num_blocks
    return merges if first + count <= last else {}


def vit_flops(tower: SquareTower, rows: int, merges: Mapping[int, int]) -> int:
    """Return the matmul FLOPs of patches and computed blocks of a transformer on one picture, in `rows` rows.

    `merges` are the rows that blocks merge, between their attention and their MLP.
    """
    d, m = tower.hidden_size, tower.intermediate_size
    flops = 2 * tower.patches * 3 * tower.patch_size**2 * d
    for block in range(tower.num_blocks):
        flops += 2 * (4 * rows * d * d + 2 * rows * rows * d)
        rows -= merges.get(block, 0)
        flops += 2 * (2 * rows * d * m)
    return flops
