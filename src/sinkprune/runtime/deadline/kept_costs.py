"""The costs of a loaded bundle's requests, in memory and in the user's cache folder, and its recent requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Generic

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.checks.arguments import check_type
from sinkprune.contract.checks.user_warnings import warn_user
from sinkprune.contract.costs.file import C, CostsFormat, cache_costs, not_kept
from sinkprune.contract.costs.model import MeasuredCosts, Place
from sinkprune.contract.errors import CostsWarning
from sinkprune.contract.manifest import Manifest
from sinkprune.runtime.backends import Backend
from sinkprune.runtime.deadline.other_load import OtherLoad
from sinkprune.runtime.deadline.request_history import RequestHistory


class KeepsCosts(Generic[C]):
    """What pipelines and policies have in common: costs that later processes find."""

    def __init__(self, bundle: Bundle, backend: Backend, costs_format: CostsFormat[C]) -> None:
        """Hold no costs yet, of `bundle` on `backend`; `costs_format` is how they are written."""
        self.bundle, self.backend = bundle, backend
        self._format: CostsFormat[C] = costs_format
        self.costs: C | None = None
        """What requests cost on this machine, for those with a deadline. `warm_up` measures it. Without it, the first
        such request reads earlier costs from the user's cache folder."""
        self.replaced_costs: C | None = None
        """The costs in the user's cache folder before the last measurement, if any."""
        self._history: tuple[C, RequestHistory] | None = None

    @property
    def place(self) -> Place:
        """The model, backend, threads and processor that costs must match to be valid here; see `read_costs`."""
        return place_of(self.bundle.manifest, self.backend)

    def save_costs(self) -> Path | None:
        """Write `costs`, and how recent requests with a deadline compare with them, to the user's cache folder.

        Later processes then expect what this one expects. Return the file, or None without costs or where the folder
        cannot be written. It takes milliseconds, so call it when no request waits.

        Warns with `CostsWarning` if the folder cannot be written. Raises `UsageError` for costs of another place, and
        `TypeError` for what are no costs.
        """
        if self.costs is None:
            return None
        costs = self._checked(self.costs)
        return self._cache(replace(costs, recent=self._history_of(costs).recent))

    def _keep_measured(self, measure: Callable[[], C], method: str = "") -> C:
        """Measure `costs` and the load meanwhile, and cache them if possible; those of actions are of a `method`."""
        replaced = self._format.cached(self.place, method)
        with self.backend.turn:
            others = OtherLoad()
            found = measure()
        self.costs, self.replaced_costs = replace(found, measured_at=time.time(), load=others.share()), replaced
        self._cache(self.costs)
        return self.costs

    def _cache(self, costs: C) -> Path | None:
        """Write costs to the user's cache folder, and return the file; else warn, and return None."""
        file = cache_costs(costs)
        if file is None:
            warn_user(not_kept(costs), CostsWarning)
        return file

    def _known_costs(self, method: str = "") -> C:
        """Return `costs`, or those of the cache folder (of actions, of a `method`).

        Raises `DeadlineError`, `UsageError` for costs of another place, and `TypeError`.
        """
        self.costs = self._format.cached(self.place, method) if self.costs is None else self.costs
        if self.costs is None:
            raise self._format.missing(self.place, method)
        return self._checked(self.costs)

    def _checked(self, costs: C) -> C:
        kind, reader = self._format.kind, self._format.reader
        check_type("costs", costs, (kind,), f"{kind.__name__}, as {reader} and warm_up return")
        self._format.check_place(costs, self.place, "the costs")
        return costs

    def _history_of(self, costs: C) -> RequestHistory:
        """Return the history of requests compared with these `costs`; it starts anew with other costs."""
        if self._history is None or self._history[0] is not costs:
            self._history = costs, RequestHistory(costs.recent)
        return self._history[1]


def warn_of_load(costs: MeasuredCosts, replaced: MeasuredCosts | None) -> None:
    """Warn with `CostsWarning` of `costs` that a busy machine measured; `replaced` are the ones kept before."""
    if doubt := costs.load_doubt(replaced):
        warn_user(f"the costs {doubt}. Measure them again with warm_up when the machine is idle.", CostsWarning)


def place_of(manifest: Manifest, backend: Backend) -> Place:
    """Return the model, backend and machine for which costs of this bundle on this backend are valid."""
    return Place(
        config_sha256=manifest.checkpoint.config_sha256,
        cut_after=manifest.cut_after,
        precision=manifest.precision,
        weights=manifest.weights.name,
        backend=backend.name,
        compute=backend.compute,
        threads=backend.threads,
        machine=backend.machine,
    )
