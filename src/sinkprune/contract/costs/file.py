"""Files of costs: where the user wants them, and in the user's cache folder for later processes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from sinkprune.contract.checks.arguments import check_path, check_type, checks_options
from sinkprune.contract.checks.fields import to_json
from sinkprune.contract.checks.format_value import counted, format_value
from sinkprune.contract.costs.actions import ACTION_COSTS_VERSION, ActionCosts
from sinkprune.contract.costs.model import COSTS_VERSION, Costs, Place
from sinkprune.contract.errors import DeadlineError, OutputError, UsageError
from sinkprune.contract.files.versioned_json import read_versioned, write_versioned

C = TypeVar("C", Costs, ActionCosts)

# By the field of the version: what a file has, and what reads it.
_KINDS = {
    "costs_version": "has the costs of answers. Give it to sinkprune-run or read_costs.",
    "action_costs_version": "has the costs of a robot policy. Give it to sinkprune-act or read_action_costs.",
}


@dataclass(frozen=True)
class CostsFormat(Generic[C]):
    """How one kind of costs is written to files, and how users measure it."""

    kind: type[C]
    name: str
    version: int
    fault: Callable[[C], str]
    """Returns what is wrong with costs whose fields are all valid, or ""."""
    of: str
    """What the costs are of, in words."""
    warm_up: str
    """The command and the function that measure and keep them."""
    reader: str
    """The function that reads a file of them."""
    again: str
    """How to write a file of them."""

    def read(self, path: str | os.PathLike[str], here: Place) -> C:
        """Return the costs in the JSON file `path`, which must have been measured at the place `here`.

        Raises `UsageError` for any other file and for costs of another bundle, backend or machine, and `TypeError` if
        `path` is no path or `here` no place.
        """
        check_path("path", path)
        check_type("here", here, (Place,), "a Place, as pipeline.place and policy.place are")
        costs = read_versioned(path, self.kind, self.name, self.version, self.again, _KINDS)
        self.check_place(costs, here, f"the {self.name} '{path}'")
        if fault := self.fault(costs):
            raise UsageError(f"the {self.name} '{path}' {fault}. {self.again}")
        return costs

    def check_place(self, costs: C, here: Place, what: str) -> None:
        """Raise `UsageError` if `costs`, in words `what`, were not measured at the place `here`."""
        theirs, ours = to_json(costs.place), to_json(here)
        for name, value in ours.items():
            if theirs[name] != value:
                these = (
                    f"For these, give --threads {theirs[name]} (threads= in Python). " if name == "threads" else ""
                )
                raise UsageError(
                    f"{what} are of another place: their '{name}' is {format_value(theirs[name])}, here it is "
                    f"{format_value(value)}. {these}{self.again}"
                )

    def cached(self, place: Place, method: str = "") -> C | None:
        """Return the costs of `place` that `cache_costs` wrote last, or None; those of actions are of a `method`.

        None also for a file that cannot be read; the next measurement replaces it.
        """
        file = cache_file(place, method)
        with suppress(UsageError, OSError):
            return self.read(file, place) if file else None
        return None

    def missing(self, place: Place, method: str = "") -> DeadlineError:
        """Return the error for a deadline at a `place` whose costs, of actions of a `method`, are not known."""
        file = cache_file(place, method)
        # Without the file's path, because the server's clients read the error.
        damaged = " Their kept file cannot be read; measuring replaces it." if file and file.exists() else ""
        return DeadlineError(
            f"a deadline was given, and the costs of {self.of} on this machine, with {place.backend} in "
            f"{counted(place.threads, 'thread')}, are not known.{damaged} Measure them on this machine first, with "
            f"{self.warm_up}, or read measured ones: --costs FILE.json, {self.reader}."
        )


def _segments_fault(costs: Costs) -> str:
    found, expected = len(costs.decoders), len(costs.place.cut_after) + 1
    return "" if found == expected else f"are of {found} decoder segments, the bundle has {expected}"


ANSWER_COSTS = CostsFormat(
    Costs,
    "costs",
    COSTS_VERSION,
    _segments_fault,
    of="requests",
    warm_up="sinkprune-run --warm-up or pipeline.warm_up(picture, prompt)",
    reader="read_costs",
    again="Measure them here with Pipeline.warm_up and write_costs in Python, or with: sinkprune-calibrate schedule "
    "BUNDLE --costs FILE.json",
)
ACTION_COSTS = CostsFormat(
    ActionCosts,
    "action costs",
    ACTION_COSTS_VERSION,
    lambda costs: "" if costs.budgets else "are of no budget, expected one at least",
    of="chunks",
    warm_up="sinkprune-act --warm-up or policy.warm_up(cameras, instruction, state)",
    reader="read_action_costs",
    again="Measure them here with Policy.warm_up and write_costs in Python.",
)


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
    return ANSWER_COSTS.read(path, here)


@checks_options
def read_action_costs(path: str | os.PathLike[str], here: Place) -> ActionCosts:
    """Return the costs of a robot policy in the JSON file `path`, which must have been measured at the place `here`.

        policy.costs = read_action_costs("chunk-costs.json", policy.place)

    Raises `UsageError` for any other file and for costs of another bundle, backend or machine, and `TypeError` if
    `path` is no path or `here` no place.
    """
    return ACTION_COSTS.read(path, here)


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


def not_kept(costs: Costs | ActionCosts, what: str = "the costs", lost: str = "later runs do not find them") -> str:
    """Return sentences about `costs` that could not be written to the user's cache folder.

    `what` could not be written of them, and so `lost` is what later processes lack.
    """
    file = _file_of(costs)
    where = f"written to '{file}'" if file else "kept, because this user has no home folder"
    return f"{what} could not be {where}, so {lost}. Make that folder writable, or set XDG_CACHE_HOME to one that is."


def cache_costs(costs: Costs | ActionCosts) -> Path | None:
    """Write `costs` to the user's cache folder. Return the file, or None where it cannot be written."""
    file = _file_of(costs)
    if file is None:
        return None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_costs(file, costs)
    except (OutputError, OSError):
        return None
    return file


def _file_of(costs: Costs | ActionCosts) -> Path | None:
    return cache_file(costs.place, costs.method if isinstance(costs, ActionCosts) else "")
