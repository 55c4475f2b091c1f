"""The number of visual rows of each picture that reach each decoder layer, by a budget and the pictures' layouts.

This module counts survivors on the host, and `sinkprune.export.pruning.shares` in graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from sinkprune.contract.budgets import UNPRUNED, Counts
from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.plans import Plan


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

    @property
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

    def size(self, num_layers: int) -> int:
        """Return the visual rows of all `num_layers` decoder layers together: they order budgets."""
        return sum(self.per_layer(num_layers))

    def kept_after(self, layer: int) -> list[int]:
        """Return the rows of each picture that survive the pruning layer `layer` (0-based)."""
        return [picture.after[layer] for picture in self.pictures]


def schedule(manifest: Manifest, method: str, budget: str, layouts: Sequence[VisualLayout]) -> Schedule:
    """Return the schedule of `method` at `budget` for pictures of these layouts. Raises `BudgetError`."""
    return scheduled(budget, manifest.plan(method, budget), layouts)


def scheduled(budget: str, plan: Plan | None, layouts: Sequence[VisualLayout]) -> Schedule:
    """Return the schedule of the `plan` of a `budget` for pictures of these layouts."""
    if plan is None:
        pictures = tuple(PictureSchedule(len(layout.unpruned_rows), {}) for layout in layouts)
        return Schedule(budget, None, pictures)
    return Schedule(budget, plan, tuple(_planned(plan, layout) for layout in layouts))


def schedules_up_to(manifest: Manifest, method: str, budget: str, layouts: Sequence[VisualLayout]) -> list[Schedule]:
    """Return the schedules of `budget` and of all budgets of `method` that keep no more of such pictures.

    The largest is first. Raises `BudgetError` for an unknown method or budget.
    """
    layers = manifest.language_model.num_layers
    most = schedule(manifest, method, budget, layouts).size(layers)
    every = [schedule(manifest, method, name, layouts) for name in (UNPRUNED, *manifest.plans[method])]
    return sorted((one for one in every if one.size(layers) <= most), key=lambda one: -one.size(layers))


def _planned(plan: Plan, layout: VisualLayout) -> PictureSchedule:
    counts, groups = plan.keeps(layout.tokens, layout.groups)
    return PictureSchedule.of(counts, groups, plan.cuts)
