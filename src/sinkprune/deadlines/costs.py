"""What requests and chunks of actions cost on a machine: files of costs, and the times that they predict.

`sinkprune.deadlines.measuring` measures the costs of requests, and `sinkprune.policies.deadline` those of chunks.
Deadlines choose budgets by them.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from sinkprune.contract.checks import (
    Bounds,
    Count,
    Few,
    check_path,
    check_type,
    checks_options,
    counted,
    format_value,
    to_json,
)
from sinkprune.contract.errors import DeadlineError, OutputError, UsageError
from sinkprune.contract.files.versioned_file import read_versioned, write_versioned
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.schedule import Schedule
from sinkprune.runtime.profiling.other_load import LOADED

COSTS_VERSION = 5
_FAR_ABOVE = 1.5
"""Curves of costs hold up to about so many times the rows that they were measured with."""
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
        hint = " If other programs always run, compare --threads 1: fewer threads may be faster then."
        return hint if self.threads > 1 else ""


Ratio = Annotated[float, Bounds(0, 1e12)]


@dataclass(frozen=True)
class RecentRatios:
    """The ratios of measured to predicted time of recent requests, the latest last."""

    first: tuple[Ratio, ...] = ()
    """From the vision tower's end to the first token."""
    token: tuple[Ratio, ...] = ()
    """Each later token."""


C = TypeVar("C", bound="MeasuredCosts")

_OTHER_KINDS = {
    "costs_version": "has the costs of answers. Give it to sinkprune-run or read_costs.",
    "action_costs_version": "has the costs of a robot policy. Give it to sinkprune-act or read_action_costs.",
}
"""What a file has, and what reads it, by the field of its version."""


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """When, where and under which load costs were measured, and how later requests compare with them."""

    name: ClassVar[str]
    version: ClassVar[int]
    of: ClassVar[str]
    """What the costs are of, in words."""
    warm_up: ClassVar[str]
    """The command and the function that measure and keep them."""
    reader: ClassVar[str]
    """The function that reads a file of them."""
    again: ClassVar[str]
    """How to write a file of them."""

    place: Place
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

    @property
    def load_doubt(self) -> str:
        """What to say after "the costs" if they were measured under load, else ""."""
        load = self.load or 0.0
        if load <= LOADED:
            return ""
        return f"were measured while other programs took {100 * load:.0f} % of the processors"

    def fault(self) -> str:
        """Return what is wrong with costs whose fields are all valid, or ""."""
        return ""

    def check_place(self, here: Place, what: str) -> None:
        """Raise `UsageError` if these costs, in words `what`, were not measured at the place `here`."""
        theirs = to_json(self.place)
        for name, value in to_json(here).items():
            if (own := theirs[name]) != value:
                these = f"For these, give --threads {own} (threads= in Python). " if name == "threads" else ""
                raise UsageError(
                    f"{what} are of another place: their '{name}' is {format_value(own)}, here it is "
                    f"{format_value(value)}. {these}{self.again}"
                )

    @classmethod
    def read(cls: type[C], path: str | os.PathLike[str], here: Place) -> C:
        """Do what `read_costs` does."""
        check_path("path", path)
        check_type("here", here, (Place,), "a Place, as pipeline.place and policy.place are")
        costs = read_versioned(path, cls, cls.name, cls.version, cls.again, _OTHER_KINDS)
        costs.check_place(here, f"the {cls.name} '{path}'")
        if fault := costs.fault():
            raise UsageError(f"the {cls.name} '{path}' {fault}. {cls.again}")
        return costs

    @classmethod
    def cached(cls: type[C], place: Place, method: str = "") -> C | None:
        """Return the costs of `place` that `cache_costs` wrote last, or None; those of actions are of a `method`.

        None also for a file that cannot be read; the next measurement replaces it.
        """
        file = cache_file(place, method)
        with suppress(UsageError, OSError):
            return cls.read(file, place) if file else None
        return None

    @classmethod
    def missing(cls, place: Place, method: str = "") -> DeadlineError:
        """Return the error for a deadline at a `place` whose costs, of actions of a `method`, are not known."""
        file = cache_file(place, method)
        # Without the file's path, because the server's clients read the error.
        damaged = " Their kept file cannot be read; measuring replaces it." if file and file.exists() else ""
        return DeadlineError(
            f"a deadline was given, and the costs of {cls.of} on this machine, with {place.backend} in "
            f"{counted(place.threads, 'thread')}, are not known.{damaged} Measure them on this machine first, with "
            f"{cls.warm_up}, or read measured ones: --costs FILE.json, {cls.reader}."
        )


@dataclass(frozen=True)
class Costs(MeasuredCosts):
    """Milliseconds of every part of a request on an idle machine."""

    name = "costs"
    version = COSTS_VERSION
    of = "requests"
    warm_up = "sinkprune-run --warm-up or pipeline.warm_up(picture, prompt)"
    reader = "read_costs"
    again = "Measure them here with sinkprune-run --warm-up, or with Pipeline.warm_up and write_costs in Python"

    costs_version: Count
    """`COSTS_VERSION`."""
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

    def fault(self) -> str:
        found, expected = len(self.decoders), len(self.place.cut_after) + 1
        return "" if found == expected else f"are of {found} decoder segments, the bundle has {expected}"

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
        changed: dict[str, Any] = {
            name: own.slower(times) for name, own in vars(self).items() if isinstance(own, Curve)
        }
        changed |= {"rest": times * self.rest, "pass_row": times * self.pass_row}
        return replace(self, **changed, decoders=tuple(curve.slower(times) for curve in self.decoders))


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
    mean = sum(len(layers) * count for layers, count in zip(manifest.segments, rows, strict=True))
    token = costs.token.ms(mean / manifest.language_model.num_layers)
    return Prediction(max(first, LEAST_MS), max(token, LEAST_MS), costs.token_start)


ACTION_COSTS_VERSION = 3
LEAST_ACTION_MS = 1e-6
"""Costs are above 0, because measured times are divided by them."""
_Milliseconds = Annotated[float, Bounds(LEAST_ACTION_MS, 1e12)]
_Rows = Annotated[float, Bounds(1, 1e9)]


@dataclass(frozen=True)
class BudgetCosts:
    """Median milliseconds of a chunk at one budget, from the end of the vision tower on."""

    before_ms: _Milliseconds
    """All but the denoising steps."""
    step_ms: _Milliseconds
    """One denoising step."""
    rows: _Rows
    """Text and visual tokens, as the mean over the decoder's layers."""

    def chunk_ms(self, steps: int) -> float:
        """Return the milliseconds of so many denoising steps and all before them."""
        return self.before_ms + steps * self.step_ms


@dataclass(frozen=True)
class ActionCosts(MeasuredCosts):
    """What chunks cost on this machine, on an idle one. `Policy.warm_up` measures it."""

    name = "action costs"
    version = ACTION_COSTS_VERSION
    of = "chunks"
    warm_up = "sinkprune-act --warm-up or policy.warm_up(cameras, instruction, state)"
    reader = "read_action_costs"
    again = "Measure them here with Policy.warm_up and write_costs in Python."

    method: str
    frames: Few
    """The number of cameras with a frame. Fewer cost less."""
    budgets: dict[str, BudgetCosts]
    """By budget, those that keep the most tokens first."""
    prompt_tokens: Count = field(kw_only=True)
    """Text tokens of the measured prompt."""
    action_costs_version: Count = ACTION_COSTS_VERSION
    """`ACTION_COSTS_VERSION`."""

    def fault(self) -> str:
        return "" if self.budgets else "are of no budget, expected one at least"

    def of_chunk(self, tokens: int, frames: int) -> dict[str, BudgetCosts]:
        """Return the costs by budget of a prompt with so many text tokens and cameras with a frame.

        A shorter prompt costs what was measured. Each further token is a row in all layers. Before the steps a row
        costs the largest budget's time, divided by its rows. In a step it costs what one row more does, by the
        largest and the smallest budget. So does, before the steps too, each visual row that fewer frames leave out.
        """
        budgets = list(self.budgets.values())
        largest, smallest = budgets[0], budgets[-1]
        more = max(0, tokens - self.prompt_tokens)
        before, step = largest.before_ms / largest.rows, largest.step_ms / largest.rows
        saved_before = saved_step = 0.0
        if largest.rows > smallest.rows:
            apart = largest.rows - smallest.rows
            step = saved_step = max(0.0, largest.step_ms - smallest.step_ms) / apart
            saved_before = max(0.0, largest.before_ms - smallest.before_ms) / apart
        found = {}
        for name, own in self.budgets.items():
            fewer = (1 - frames / self.frames) * max(0.0, own.rows - self.prompt_tokens)
            found[name] = replace(
                own,
                before_ms=max(LEAST_ACTION_MS, own.before_ms + more * before - fewer * saved_before),
                step_ms=max(LEAST_ACTION_MS, own.step_ms + more * step - fewer * saved_step),
            )
        return found


@checks_options
def write_costs(path: str | os.PathLike[str], costs: Costs | ActionCosts) -> None:
    """Write costs, as `Pipeline.warm_up` or `Policy.warm_up` returns them, to the JSON file `path`.

    Raises `OutputError` if the file cannot be written, is a link or a device, or lies in a bundle or engines, and
    `TypeError` if `path` is no path or `costs` no costs.
    """
    check_path("path", path)
    check_type("costs", costs, (Costs, ActionCosts), "Costs or ActionCosts, as read_costs and warm_up return")
    write_versioned(path, costs)


@checks_options
def read_costs(path: str | os.PathLike[str], here: Place) -> Costs:
    """Return the costs of a pipeline in the JSON file `path`, which must have been measured at the place `here`.

        pipeline.costs = read_costs("costs.json", pipeline.place)

    Raises `UsageError` for any other file and for costs of another bundle, backend or machine, and `TypeError` if
    `path` is no path or `here` no place.
    """
    return Costs.read(path, here)


@checks_options
def read_action_costs(path: str | os.PathLike[str], here: Place) -> ActionCosts:
    """Return the costs of a robot policy in the JSON file `path`; takes and raises what `read_costs` does.

    policy.costs = read_action_costs("chunk-costs.json", policy.place)
    """
    return ActionCosts.read(path, here)


def cache_file(place: Place, method: str = "") -> Path | None:
    """Return the file for the costs of `place`, whether it exists or not; None for a user without a home folder.

    One file for each place (and `method`, of actions), which bundles of equal graphs share:
    `$XDG_CACHE_HOME/sinkprune/costs/*.json`, or below `~/.cache` where that variable is unset (XDG Base Directory
    Specification).
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not folder.is_absolute():
        try:
            folder = Path.home() / ".cache"
        except RuntimeError:
            return None
    key = hashlib.sha256((json.dumps(to_json(place), sort_keys=True) + method).encode()).hexdigest()
    return folder / "sinkprune" / "costs" / f"{key[:32]}.json"


def not_kept(costs: MeasuredCosts) -> str:
    """Return sentences about `costs` that could not be written to the user's cache folder."""
    file = _file_of(costs)
    where = f"written to '{file}'" if file else "kept, because this user has no home folder"
    return (
        f"the costs, with the times of recent requests, could not be {where}, so later runs do not find them. Make "
        "that folder writable, or set XDG_CACHE_HOME to one that is."
    )


def cache_costs(costs: MeasuredCosts) -> Path | None:
    """Write `costs` to the user's cache folder. Return the file, or None where it cannot be written."""
    file = _file_of(costs)
    if file is None:
        return None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_versioned(file, costs)
    except (OutputError, OSError):
        return None
    return file


def _file_of(costs: MeasuredCosts) -> Path | None:
    return cache_file(costs.place, costs.method if isinstance(costs, ActionCosts) else "")
