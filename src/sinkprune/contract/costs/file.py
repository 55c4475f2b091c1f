"""Read and write a machine's costs, in a file apart from bundles and engines."""

from __future__ import annotations

import json
import os
from pathlib import Path

from sinkprune.contract.checks.arguments import check_path
from sinkprune.contract.checks.fields import SchemaError, from_json, to_json
from sinkprune.contract.checks.format_value import format_value
from sinkprune.contract.costs.model import COSTS_VERSION, Costs, Place, Recent
from sinkprune.contract.errors import UsageError
from sinkprune.contract.files.output_files import write_whole
from sinkprune.contract.files.untrusted import UnreadableError, read_json

_AGAIN = "Measure them here with: sinkprune-calibrate schedule BUNDLE --costs FILE.json"


def write_costs(path: str | os.PathLike[str], costs: Costs) -> None:
    """Write the costs of requests, as `Pipeline.warm_up` returns them, to the JSON file `path`.

    Raises `OutputError` if the file cannot be written, and `TypeError` if `path` is no path.
    """
    check_path("path", path)
    write_whole(Path(path), (json.dumps(to_json(costs), indent=1) + "\n").encode())


def read_costs(path: str | os.PathLike[str], here: Place) -> Costs:
    """Return the costs in the JSON file `path`, which must have been measured at the place `here`.

        pipeline.costs = read_costs("costs.json", pipeline.place)

    Raises `UsageError` for any other file and for costs of another bundle, backend or machine, and `TypeError` if
    `path` is no path.
    """
    check_path("path", path)
    try:
        data = read_json(Path(path))
    except UnreadableError as error:
        raise UsageError(f"the costs '{path}' {error}. {_AGAIN}") from error
    version = data.get("costs_version") if isinstance(data, dict) else None
    if version == 1 and type(version) is int:
        # Version 1 lacks the time and load of the measurement, and later requests.
        version = COSTS_VERSION
        data = {**data, "costs_version": version, "measured_at": None, "load": None, "recent": to_json(Recent())}
    if type(version) is not int or version != COSTS_VERSION:
        raise UsageError(
            f"the costs '{path}' have the version {format_value(version)}, this sinkprune reads {COSTS_VERSION}. "
            f"{_AGAIN}"
        )
    try:
        costs = from_json(Costs, data)
    except SchemaError as error:
        raise UsageError(f"the costs '{path}' are malformed at {error}. {_AGAIN}") from error
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
