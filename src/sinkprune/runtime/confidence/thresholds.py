"""The thresholds of budget `auto`, and their file, which `sinkprune-calibrate confidence` writes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import inf
from typing import Annotated

from sinkprune.contract.budgets import AUTO
from sinkprune.contract.bundle import Bundle
from sinkprune.contract.checks.arguments import check_path, check_type, checks_options, creation_checks_options
from sinkprune.contract.checks.fields import Bounds
from sinkprune.contract.checks.format_value import format_value
from sinkprune.contract.errors import UsageError
from sinkprune.contract.files.versioned_json import read_versioned, write_versioned
from sinkprune.contract.manifest import Manifest
from sinkprune.runtime.steps.loaded_model import check_chosen_after_tower
from sinkprune.runtime.steps.prefix_cache import ladders

THRESHOLDS_VERSION = 1
_MEASURE = "sinkprune-calibrate confidence BUNDLE --data FILE.jsonl --thresholds thresholds.json"
_AGAIN = f"Measure them for this bundle: {_MEASURE}"


@creation_checks_options
@dataclass(frozen=True)
class Thresholds:
    """The budgets that a request at budget `auto` may try, and how sure an answer must be at each."""

    thresholds_version: int
    bundle_sha256: str
    """The sum of the bundle's `bundle.json`. The confidences of other bundles mean something else."""
    compute: str
    """What engines computed in, in words: rounding changes confidences."""
    method: str
    least: dict[str, Annotated[float, Bounds(0, 1)]]
    """By budget, in the order in which budgets are tried: the least confidence of an answer that stands. The last
    answer stands anyway."""

    def check(self, bundle: Bundle, method: str, compute: str | None = None) -> None:
        """Raise `UsageError` unless the thresholds are of this bundle and method, and of `compute` where it is known.

        Raises `BudgetError` for a method or budget that the bundle does not have.
        """
        if self.bundle_sha256 != bundle.sha256:
            raise UsageError(
                f"the thresholds are of a bundle with the sum {format_value(self.bundle_sha256)}, and this bundle's "
                f"is '{bundle.sha256}'. {_AGAIN}"
            )
        if self.method != method:
            raise UsageError(
                f"the thresholds are of method {format_value(self.method)}, and the request has '{method}'. {_AGAIN} "
                f"--method {method}"
            )
        if compute not in (None, self.compute):
            raise UsageError(
                f"the thresholds were measured with engines that compute in {format_value(self.compute)}, and these "
                f"compute in '{compute}'. {_AGAIN}"
            )
        # An infinite one, which no file has, asks at every budget.
        least = self.least.values() if isinstance(self.least, dict) else [self.least]
        if wrong := [one for one in least if not isinstance(one, (int, float)) or not (0 <= one <= 1 or one == inf)]:
            raise UsageError(
                f"a least confidence of the thresholds is {format_value(wrong[0])}, expected a number from 0 to 1. "
                f"{_AGAIN}"
            )
        for budget in self.least:
            bundle.manifest.plan(method, budget)


def usable_thresholds(thresholds: object, bundle: Bundle, method: str, compute: str) -> Thresholds:
    """Return `thresholds` that are valid for a bundle, a method and what engines compute in.

    Raises `UsageError` for None and for other thresholds, and `TypeError` for another type.
    """
    if thresholds is None:
        raise missing_thresholds(bundle.manifest, method)
    check_type("thresholds", thresholds, (Thresholds,), "Thresholds, as read_thresholds returns")
    assert isinstance(thresholds, Thresholds)
    if not thresholds.least:
        raise UsageError(f"the thresholds name no budget. {_AGAIN}")
    thresholds.check(bundle, method, compute)
    return thresholds


def missing_thresholds(manifest: Manifest, method: str) -> UsageError:
    """Return the error about a request at budget `auto` without thresholds.

    Raises `UsageError` for a method that no thresholds would help.
    """
    check_chosen_after_tower(manifest, method)
    return UsageError(
        f"budget '{AUTO}' needs thresholds of confidence, and there are none. They depend on model and questions, so "
        f"measure them: {_MEASURE}. Then give --thresholds thresholds.json, or in Python pipeline.thresholds = "
        f"read_thresholds('thresholds.json'). {describe_ladders(manifest, method)}"
    )


def describe_ladders(manifest: Manifest, method: str) -> str:
    """Return a sentence about the budgets of a method whose steps share more than the vision tower."""
    found = ladders(manifest, method)
    if not found:
        return (
            "In this bundle budgets share the vision tower only; budgets with the same sanitizer, as "
            "sinkprune-export --budgets with from-BUDGET makes them, share the first decoder layers too."
        )
    groups = "; ".join(", ".join(budgets) for budgets in found)
    return f"Budgets of this bundle that share a sanitizer, and with it the first decoder layers: {groups}."


@checks_options
def write_thresholds(path: str | os.PathLike[str], thresholds: Thresholds) -> None:
    """Write the thresholds to the JSON file `path`.

    Raises `OutputError` if the file cannot be written, is a link or a device, or lies in a bundle or engines, and
    `TypeError` for wrong types.
    """
    check_path("path", path)
    check_type("thresholds", thresholds, (Thresholds,), "Thresholds, as read_thresholds returns")
    write_versioned(path, thresholds)


@checks_options
def read_thresholds(path: str | os.PathLike[str]) -> Thresholds:
    """Return the thresholds in the JSON file `path`, for `Pipeline.thresholds`.

        pipeline.thresholds = read_thresholds("thresholds.json")

    Raises `UsageError` for any other file, and `TypeError` if `path` is no path. Requests compare the thresholds with
    the bundle.
    """
    check_path("path", path)
    found = read_versioned(path, Thresholds, "thresholds", THRESHOLDS_VERSION, _AGAIN)
    if not found.least:
        raise UsageError(f"the thresholds '{path}' name no budget. {_AGAIN}")
    return found
