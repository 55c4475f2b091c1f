"""How many visual rows of each picture reach each decoder layer: made once, of a budget and the pictures' layouts.

The arithmetic of survivors stands here for the host, and in `sinkprune.export.pruning.shares` for graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from sinkprune.contract.budgets import Counts
from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.plans import Plan


@dataclass(frozen=True)
class PictureSchedule:
    """What becomes of the visual rows of one picture."""

    rows: int
    """Rows in front of the first decoder layer."""
    after: dict[int, int]
    """By pruning layer (0-based): the rows that survive it."""
    counts: Counts | None = None
    """What the sanitizer keeps of each group it is given; None where nothing prunes."""
    groups: int = 1
    """How many groups the sanitizer is given."""

    @classmethod
    def of(cls, counts: Counts, groups: int, cuts: Sequence[int]) -> PictureSchedule:
        """Of `groups` groups with `counts` each, whose stages, of all groups, follow the layers `cuts`."""
        rows = left = groups * counts.kept
        after = {}
        for cut, stage in zip(cuts, counts.stages, strict=True):
            # A stage that may keep more than there is drops nothing (method.md section 2).
            after[cut] = left = min(left, stage)
        return cls(rows, after, counts, groups)

    def reaching(self, layer: int) -> int:
        """The rows that decoder layer `layer` (0-based) runs on; the head's are those behind the last layer."""
        return min([self.rows, *(left for cut, left in self.after.items() if cut < layer)])

    def mean(self, num_layers: int) -> Fraction:
        """Rows a layer, on average, each layer booked with those it really ran on (method.md section 5)."""
        return Fraction(sum(map(self.reaching, range(num_layers))), num_layers)


@dataclass(frozen=True)
class Schedule:
    """What a method keeps at a budget of all pictures of a request."""

    plan: Plan | None
    """Its graphs; None for the unpruned engines."""
    pictures: tuple[PictureSchedule, ...]

    @property
    def rows(self) -> int:
        """Visual rows of all pictures in front of the first decoder layer."""
        return sum(picture.rows for picture in self.pictures)

    def reaching(self, layer: int) -> int:
        """The visual rows of all pictures that decoder layer `layer` (0-based) runs on."""
        return sum(picture.reaching(layer) for picture in self.pictures)

    def per_layer(self, num_layers: int) -> list[int]:
        """The visual rows of all pictures that each of so many decoder layers runs on."""
        return [self.reaching(layer) for layer in range(num_layers)]

    def kept_after(self, layer: int) -> list[int]:
        """The rows of each picture that survive the pruning layer `layer` (0-based)."""
        return [picture.after[layer] for picture in self.pictures]


def schedule(manifest: Manifest, method: str, budget: str, layouts: Sequence[VisualLayout]) -> Schedule:
    """The schedule of `method` at `budget` for pictures of these layouts; raises `BudgetError`."""
    plan = manifest.plan(method, budget)
    if plan is None:
        return Schedule(None, tuple(PictureSchedule(len(layout.unpruned_rows), {}) for layout in layouts))
    return Schedule(plan, tuple(_planned(plan, layout) for layout in layouts))


def _planned(plan: Plan, layout: VisualLayout) -> PictureSchedule:
    counts, groups = plan.keeps(layout.tokens, layout.groups)
    return PictureSchedule.of(counts, groups, plan.cuts)
