"""Costs in the user's cache folder, for later processes."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from sinkprune.contract.checks.fields import to_json
from sinkprune.contract.costs.file import read_costs, write_costs
from sinkprune.contract.costs.model import Costs, Place
from sinkprune.contract.errors import OutputError, UsageError


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
