"""Files of costs: where the user wants them, and in the user's cache folder for later processes."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from sinkprune.contract.checks.arguments import check_path, check_type
from sinkprune.contract.checks.fields import to_json
from sinkprune.contract.checks.format_value import counted, format_value
from sinkprune.contract.costs.model import COSTS_VERSION, Costs, Place, RecentRatios
from sinkprune.contract.errors import DeadlineError, OutputError, UsageError
from sinkprune.contract.files.versioned_json import read_versioned, write_versioned

_AGAIN = (
    "Measure them here with Pipeline.warm_up and write_costs in Python, or with: sinkprune-calibrate schedule BUNDLE "
    "--costs FILE.json"
)


def write_costs(path: str | os.PathLike[str], costs: Costs) -> None:
    """Write the costs of requests, as `Pipeline.warm_up` returns them, to the JSON file `path`.

    Raises `OutputError` if the file cannot be written, and `TypeError` if `path` is no path or `costs` no costs.
    """
    check_path("path", path)
    check_type("costs", costs, (Costs,), "Costs, as read_costs and warm_up return")
    write_versioned(path, costs)


def read_costs(path: str | os.PathLike[str], here: Place) -> Costs:
    """Return the costs in the JSON file `path`, which must have been measured at the place `here`.

        pipeline.costs = read_costs("costs.json", pipeline.place)

    Raises `UsageError` for any other file and for costs of another bundle, backend or machine, and `TypeError` if
    `path` is no path or `here` no place.
    """
    check_path("path", path)
    check_type("here", here, (Place,), "a Place, as pipeline.place is")
    costs = read_versioned(path, Costs, "costs", COSTS_VERSION, _AGAIN, _upgraded)
    theirs, ours = to_json(costs.place), to_json(here)
    for name, value in ours.items():
        if theirs[name] != value:
            raise UsageError(
                f"the costs '{path}' are of another place: their {name} is {format_value(theirs[name])}, here it is "
                f"{format_value(value)}. {_AGAIN}"
            )
    if len(costs.decoders) != len(here.cut_after) + 1:
        raise UsageError(
            f"the costs '{path}' are of {len(costs.decoders)} decoder segments, the bundle has "
            f"{len(here.cut_after) + 1}. {_AGAIN}"
        )
    return costs


def _upgraded(data: dict[str, Any]) -> dict[str, Any]:
    """Return costs of version 1, which lacks the time and load of the measurement, and later requests, as now."""
    version = data["costs_version"]
    if type(version) is not int or version != 1:
        return data
    added = {"measured_at": None, "load": None, "recent": to_json(RecentRatios())}
    return {**data, **added, "costs_version": COSTS_VERSION}


def missing_costs(place: Place) -> DeadlineError:
    """Return the error for a deadline at a `place` whose costs are not known."""
    return DeadlineError(
        f"a deadline was given, and the costs of requests on this machine, with {place.backend} in "
        f"{counted(place.threads, 'thread')}, are not known. Measure them on this machine first, with sinkprune-run "
        "--warm-up or pipeline.warm_up(picture, prompt), or read measured ones: --costs FILE.json, read_costs."
    )


def cache_file(place: Place) -> Path | None:
    """Return the file for the costs of `place`, whether it exists or not; None for a user without a home folder.

    One file for each bundle, backend and machine: `$XDG_CACHE_HOME/sinkprune/costs/*.json`, or below `~/.cache`
    where that variable is unset (XDG Base Directory Specification).
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not folder.is_absolute():
        try:
            folder = Path.home() / ".cache"
        except RuntimeError:
            return None
    key = hashlib.sha256(json.dumps(to_json(place), sort_keys=True).encode()).hexdigest()
    return folder / "sinkprune" / "costs" / f"{key[:32]}.json"


def cached_costs(place: Place) -> Costs | None:
    """Return the costs of `place` that `cache_costs` wrote last, or None.

    None also for a file that cannot be read; the next measurement replaces it.
    """
    file = cache_file(place)
    if file is None:
        return None
    try:
        return read_costs(file, place)
    except (UsageError, OSError):
        return None


def cache_costs(costs: Costs) -> Path | None:
    """Write `costs` to the user's cache folder. Return the file, or None where it cannot be written."""
    file = cache_file(costs.place)
    if file is None:
        return None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_costs(file, costs)
    except (OutputError, OSError):
        return None
    return file
