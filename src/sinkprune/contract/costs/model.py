"""What a request costs on a machine: milliseconds of each of its parts against the rows that the part is given.

One model for all who ask: `sinkprune-calibrate schedule` proposes budgets by it, and requests with a deadline choose
among them. Measured by `sinkprune.runtime.deadline.cost_measuring`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import numpy as np

from sinkprune.contract.checks.fields import Bounds, Count
from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.schedule import Schedule

COSTS_VERSION = 2
LOADED = 0.25
"""Costs are doubtful if other programs took a larger share of the processors meanwhile."""
Milliseconds = Annotated[float, Bounds(0, 1e12)]


@dataclass(frozen=True)
class Curve:
    """`constant` + `linear` * rows + `quadratic` * rows**2 milliseconds. None is negative, so more rows never cost
    less."""

    constant: Milliseconds
    linear: Milliseconds
    quadratic: Milliseconds

    def ms(self, rows: Any) -> Any:
        """The milliseconds that `rows` take, a number or an array of numbers."""
        return self.constant + self.linear * rows + self.quadratic * rows**2

    def slower(self, times: float) -> Curve:
        """The curve of a machine that takes so many times as long."""
        return Curve(times * self.constant, times * self.linear, times * self.quadratic)


# What takes less is not there, or no clock tells.
_LEAST_MS = 1e-4
# Those of fewer parts first: they are taken where they fit as well. One measurement is taken to be in proportion.
_PARTS = ((1,), (0,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2))


def fit(rows: Sequence[float], ms: Sequence[float]) -> Curve:
    """The curve whose relative errors have the least sum of squares, of at least one measurement above 0 ms.

    Non-negative least squares: with three parts all choices of those above zero are tried.
    """
    weight = 1 / np.array(ms, np.float64)
    columns = np.stack([weight, weight * rows, weight * np.square(rows)], axis=1)
    best, least = np.zeros(3), np.inf
    for parts in _PARTS:
        chosen = columns[:, parts]
        scale = np.linalg.norm(chosen, axis=0)
        if not scale.all():
            continue
        found, _, rank, _ = np.linalg.lstsq(chosen / scale, np.ones(len(weight)), rcond=1e-9)
        error = float(np.sum((chosen / scale @ found - 1) ** 2))
        if rank == len(parts) and (found >= 0).all() and error < least - 1e-15:
            best, least = np.zeros(3), error
            best[list(parts)] = found / scale
    return Curve(*best.tolist())


def fit_measured(points: Iterable[tuple[float, float]]) -> Curve:
    """The curve of measurements, each of some rows and the milliseconds they took; those that took none are left out,
    and of none is a curve of 0."""
    known = [(rows, ms) for rows, ms in points if ms >= _LEAST_MS]
    return fit(*zip(*known, strict=True)) if known else Curve(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Place:
    """What costs hold for: elsewhere they are others."""

    config_sha256: str
    """Of the checkpoint's configuration, which says how large its graphs are."""
    cut_after: tuple[Count, ...]
    """The 0-based decoder layers that the bundle is cut after."""
    precision: str
    weights: str
    backend: str
    compute: str
    """What engines compute in, in words."""
    threads: Count
    machine: str
    """The processor, in words."""


Ratio = Annotated[float, Bounds(0, 1e12)]


@dataclass(frozen=True)
class Recent:
    """How many times as long as by their costs recent requests took, the latest last."""

    first: tuple[Ratio, ...] = ()
    """From the vision tower's end to the first token."""
    token: tuple[Ratio, ...] = ()
    """Each later token."""


@dataclass(frozen=True)
class Costs:
    """Milliseconds of every part of a request, on a machine that does nothing else."""

    costs_version: Count
    """`COSTS_VERSION`."""
    place: Place
    tower: Curve
    """A picture's way through processor and vision tower, against its visual tokens."""
    sanitizer: Curve
    """Of a picture, against the tokens it keeps."""
    projector: Curve
    """Of a picture, against its rows."""
    decoders: tuple[Curve, ...]
    """A prefill's way through each decoder segment, against its rows."""
    select: Curve
    """Against the rows it is given."""
    rest: Milliseconds
    """What none of the others is: the head, rows laid out, results checked and read back, a token chosen, and what a
    decoder takes longer in a request, where other engines ran before it, than by itself."""
    token: Curve
    """A token behind the first, against the rows that caches hold, mean over the layers."""
    measured_at: Annotated[float, Bounds(0, 1e12)] | None = None
    """When they were measured, in seconds of Unix time; None where the file does not say."""
    load: Annotated[float, Bounds(0, 1)] | None = None
    """The share of the machine's processor time that other programs took meanwhile; None where it is not known."""
    recent: Recent = Recent()
    """Requests that ran since, under the load of that time."""

    def slower(self, times: float) -> Costs:
        """The costs of a machine that takes so many times as long."""
        return replace(
            self,
            tower=self.tower.slower(times),
            sanitizer=self.sanitizer.slower(times),
            projector=self.projector.slower(times),
            decoders=tuple(curve.slower(times) for curve in self.decoders),
            select=self.select.slower(times),
            rest=times * self.rest,
            token=self.token.slower(times),
        )


class Prediction(NamedTuple):
    """Milliseconds that a request is expected to take."""

    tower: float
    """Up to where budgets begin to differ: pictures behind the vision tower."""
    first: float
    """From there to the first token."""
    token: float
    """Each token behind the first."""

    def latency(self, tokens: int) -> float:
        """The whole answer, of so many tokens."""
        return self.tower + self.first + (tokens - 1) * self.token


def predict(
    costs: Costs, manifest: Manifest, planned: Schedule, text: int, layouts: Sequence[VisualLayout]
) -> Prediction:
    """What pictures of these `layouts`, pruned as `planned`, and `text` tokens take."""
    rows = [text + planned.reaching(layers.start) for layers in manifest.segments]
    first = costs.rest
    for picture in planned.pictures:
        if planned.plan is not None and planned.plan.sanitizer is not None:
            first += costs.sanitizer.ms(picture.rows)
        if manifest.projector:
            first += costs.projector.ms(picture.rows)
    for layers, curve, count in zip(manifest.segments, costs.decoders, rows, strict=True):
        first += curve.ms(count)
        if planned.plan is not None and str(layers[-1]) in planned.plan.select_after:
            first += costs.select.ms(count)
    tower, token = sum(costs.tower.ms(layout.all_tokens) for layout in layouts), costs.token.ms(_mean(manifest, rows))
    return Prediction(tower, max(first, _LEAST_MS), max(token, _LEAST_MS))


def _mean(manifest: Manifest, rows: Sequence[int]) -> float:
    """The mean over all layers, where `rows` are those of each segment."""
    layers = manifest.language_model.num_layers
    return sum(len(segment) * count for segment, count in zip(manifest.segments, rows, strict=True)) / layers
