"""The cost model: milliseconds of each part of a request on a machine, as a function of the part's rows.

`sinkprune-calibrate schedule` proposes budgets by this model, and requests with a deadline choose among budgets.
`sinkprune.runtime.deadline.cost_measuring` measures the costs.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import numpy as np

from sinkprune.contract.checks.fields import Bounds, Count
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.schedule import Schedule

COSTS_VERSION = 5
_FAR_ABOVE = 1.5
"""Curves of costs hold up to about so many times the rows that they were measured with."""
LOADED = 0.25
"""Costs are doubtful if other programs took a larger share of the processors meanwhile."""
_CLEARLY = 0.1
"""Costs replace better ones if the load meanwhile was higher by this share of the processors."""
Milliseconds = Annotated[float, Bounds(0, 1e12)]


@dataclass(frozen=True)
class Curve:
    """`constant` + `linear` * rows + `quadratic` * rows**2 milliseconds, with coefficients of 0 or more."""

    constant: Milliseconds
    linear: Milliseconds
    quadratic: Milliseconds

    def ms(self, rows: Any) -> Any:
        """Return the milliseconds of `rows`, a number or an array."""
        return self.constant + self.linear * rows + self.quadratic * rows**2

    def slower(self, times: float) -> Curve:
        """Return the curve of a machine that is slower by the factor `times`."""
        return Curve(times * self.constant, times * self.linear, times * self.quadratic)


LEAST_MS = 1e-4
"""Less is absent, or below the clock's resolution."""
# Fewer parts first: they win if they fit equally well. A single measurement gives a linear curve.
_PARTS = ((1,), (0,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2))


def fit(rows: Sequence[float], ms: Sequence[float]) -> Curve:
    """Return the curve with the least sum of squared relative errors, of at least one measurement above 0 ms.

    Non-negative least squares: all choices of nonzero coefficients are tried.
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
    """Return the curve of measurements (rows, milliseconds). Without any above 0 ms, the curve is 0."""
    known = [(rows, ms) for rows, ms in points if ms >= LEAST_MS]
    return fit(*zip(*known, strict=True)) if known else Curve(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Place:
    """The kind of model, the backend and the machine that costs are valid for. Bundles of equal graphs share it."""

    config_sha256: str
    """The sha256 of the checkpoint's configuration, which determines the size of graphs."""
    cut_after: tuple[Count, ...]
    """The 0-based decoder layers that the bundle is cut after."""
    precision: str
    weights: str
    backend: str
    compute: str
    """The type that engines compute in, in words."""
    threads: Count
    machine: str
    """The processor, in words."""

    @property
    def thread_hint(self) -> str:
        """A sentence of advice for a command on a machine that other programs keep busy; "" for one thread."""
        if self.threads <= 1:
            return ""
        return " If other programs always run, compare --threads 1: fewer threads may be faster then."


Ratio = Annotated[float, Bounds(0, 1e12)]


@dataclass(frozen=True)
class RecentRatios:
    """The ratios of measured to predicted time of recent requests, the latest last."""

    first: tuple[Ratio, ...] = ()
    """From the vision tower's end to the first token."""
    token: tuple[Ratio, ...] = ()
    """Each later token."""


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """When and under which load costs were measured, and how later requests compare with them."""

    measured_at: Annotated[float, Bounds(0, 1e12)] | None = None
    """The time of the measurement, in seconds of Unix time; None before they are kept."""
    load: Annotated[float, Bounds(0, 1)] | None = None
    """The share of processor time of other programs meanwhile; None if it is unknown."""
    recent: RecentRatios = RecentRatios()
    """Later requests, under the load of their time."""

    @property
    def age_s(self) -> float | None:
        """Seconds since the measurement; None if its time is unknown."""
        return None if self.measured_at is None else max(0.0, time.time() - self.measured_at)

    def load_doubt(self, earlier: MeasuredCosts | None = None) -> str:
        """Return what to say after "the costs" if they were measured under load, else nothing.

        It also names the load of `earlier` costs, which these replace, if that was clearly lower.
        """
        load = self.load or 0.0
        if load <= LOADED:
            return ""
        text = f"were measured while other programs took {100 * load:.0f} % of the processors"
        if earlier is None or earlier.load is None or load - earlier.load < _CLEARLY:
            return text
        return f"{text}, and replace costs measured at {100 * earlier.load:.0f} %"


@dataclass(frozen=True)
class Costs(MeasuredCosts):
    """Milliseconds of every part of a request on an idle machine."""

    costs_version: Count
    """`COSTS_VERSION`."""
    place: Place
    tower: Curve
    """Preprocessing and vision tower of a picture, by its visual tokens."""
    sanitizer: Curve
    """Of a picture, by the tokens it keeps."""
    projector: Curve
    """Of a picture, by its rows."""
    decoders: tuple[Curve, ...]
    """Prefill of each decoder segment, by its rows."""
    select: Curve
    """By its input rows."""
    rest: Milliseconds
    """All other work: the head, laying out rows, checking and reading results, and sampling. Also the time that a
    decoder takes longer after other engines than alone."""
    token: Curve
    """A token after the first few, by the rows in the caches, as the mean over the layers."""
    token_start: tuple[Ratio, ...]
    """For each of the first few tokens after the prompt: its time as a multiple of a later token's. A prefill takes
    the weights of a small model out of the processor's caches."""
    pass_row: Milliseconds
    """Of a pass over several rows, as for an answer of a closed list: each row after the first, with the head."""
    most_rows: Count
    """The most tokens of a measured prompt, text and visual."""

    def far_above(self, rows: int) -> str:
        """Return what to say after a reason if a prompt has far more `rows` than any measured one, else nothing."""
        if rows <= _FAR_ABOVE * self.most_rows:
            return ""
        return (
            f"; the costs were measured with up to {self.most_rows} tokens in the prompt, and this one has {rows}: "
            "expected times may be far too long. Measure the costs with your largest picture, at your largest budget"
        )

    def slower(self, times: float) -> Costs:
        """Return the costs of a machine that is slower by the factor `times`."""
        return replace(
            self,
            tower=self.tower.slower(times),
            sanitizer=self.sanitizer.slower(times),
            projector=self.projector.slower(times),
            decoders=tuple(curve.slower(times) for curve in self.decoders),
            select=self.select.slower(times),
            rest=times * self.rest,
            token=self.token.slower(times),
            pass_row=times * self.pass_row,
        )


class Prediction(NamedTuple):
    """The predicted milliseconds of a request after its vision tower, which all budgets share."""

    first: float
    """From the end of the vision tower to the first token."""
    token: float
    """Each later token, after the first few."""
    start: tuple[float, ...] = ()
    """As `Costs.token_start`."""

    def later(self, tokens: int) -> float:
        """Return the milliseconds of so many tokens after the first."""
        return self.token * later_tokens(self.start, tokens)

    def of_passes(self, rows: Sequence[int], row_ms: float) -> Prediction:
        """Return the prediction of passes over so many `rows` each, in place of tokens.

        Each begins from the prompt's rows, as the first token does. `row_ms` is `Costs.pass_row`.
        """
        first = self.later(1) / self.token
        return self._replace(start=tuple(first + (count - 1) * row_ms / self.token for count in rows))

    def whole(self, tokens: int) -> float:
        """Return the milliseconds of an answer of so many tokens, after the vision tower."""
        return self.first + self.later(tokens - 1)

    def within(self, ms: float, most: int) -> int:
        """Return how many tokens after the first, up to `most`, take at most `ms`."""
        return bisect_right(range(1, most + 1), ms, key=self.later)


def later_tokens(start: Sequence[float], tokens: int) -> float:
    """Return the time of so many tokens after the first, as a multiple of a late one's.

    `start` is as `Costs.token_start`.
    """
    return sum(start[:tokens]) + max(0, tokens - len(start))


def predict(costs: Costs, manifest: Manifest, planned: Schedule, text: int) -> Prediction:
    """Predict a request with `text` tokens, and pictures pruned as `planned`."""
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
    token = costs.token.ms(_mean(manifest, rows))
    return Prediction(max(first, LEAST_MS), max(token, LEAST_MS), costs.token_start)


def _mean(manifest: Manifest, rows: Sequence[int]) -> float:
    """Return the mean over all layers of the `rows` of each segment."""
    layers = manifest.language_model.num_layers
    return sum(len(segment) * count for segment, count in zip(manifest.segments, rows, strict=True)) / layers
