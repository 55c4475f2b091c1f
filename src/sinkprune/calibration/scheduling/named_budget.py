"""Adds a budget to a bundle in its folder: new graphs of kilobytes and a new manifest, without copying weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version

from sinkprune.calibration.changed_bundle import changed_folder, check_changeable
from sinkprune.calibration.scheduling.trials import plan_facts
from sinkprune.contract.budgets import UNPRUNED, Budget
from sinkprune.contract.bundle import Bundle
from sinkprune.contract.checks.format_value import format_value
from sinkprune.contract.errors import BudgetError
from sinkprune.contract.families import FAMILIES
from sinkprune.contract.files.manifest_file import FileSpec, sha256
from sinkprune.contract.files.signature import Sign
from sinkprune.contract.manifest import BUNDLE, Manifest
from sinkprune.export.methods.sinkpruner import build_after
from sinkprune.export.planning import save_plan

METHOD = "sinkpruner"
_NAME = re.compile("[a-z0-9][a-z0-9._-]{0,63}")


def check_name(manifest: Manifest, name: str) -> None:
    """Raise `BudgetError` for a name that a budget of this bundle may not have."""
    if not _NAME.fullmatch(name):
        raise BudgetError(
            f"the name {format_value(name)} cannot be a budget's, expected up to 64 of a-z, 0-9, dots, dashes and "
            "underscores, a letter or digit first. Choose another --name."
        )
    if name == UNPRUNED or name in FAMILIES[manifest.family].budgets:
        raise BudgetError(
            f"'{name}' is the name of a budget that every bundle of family '{manifest.family}' may have, and means "
            "the same in each. Choose another --name."
        )


def check_addable(bundle: Bundle, name: str, *, force: bool, signed: bool) -> None:
    """Check that a budget can be added; raises `BudgetError` for the name, `BundleError` for the bundle.

    `force` allows replacing a budget that was added before; `signed` means that the new manifest will be signed.
    """
    manifest = bundle.manifest
    check_name(manifest, name)
    if name in manifest.budgets and not force:
        raise BudgetError(
            f"the bundle holds a budget '{name}' already. Add --force to replace it, or choose another --name."
        )
    check_changeable(bundle, signed=signed)


def add_budget(
    bundle: Bundle, name: str, budget: Budget, cuts: Sequence[int], *, force: bool = False, sign: Sign | None = None
) -> Manifest:
    """Write `budget` into the folder of `bundle` under `name`, with its stages after the layers `cuts`.

    A new folder of hard links to the present files and of the new graphs replaces the old one. After a kill at any
    moment the next command finds the bundle with the budget or without it. Raises what `check_addable` raises, and
    `BundleError` if the bundle changed since it was read or its disk has no hard links.
    """
    check_addable(bundle, name, force=force, signed=sign is not None)
    manifest = bundle.manifest
    former = manifest.plans.get(METHOD, {}).get(name)
    dropped = {graph: manifest.graphs[graph].file for graph in (former.graphs if former else ())}
    files = {file: spec for file, spec in manifest.files.items() if file not in dropped.values()}
    graphs = {graph: spec for graph, spec in manifest.graphs.items() if graph not in dropped}
    with changed_folder(bundle, [*files]) as new:
        facts = plan_facts(manifest)
        plan, own = save_plan(new, facts, METHOD, name, build_after(facts, budget, cuts))
        for spec in own.values():
            files[spec.file] = FileSpec((new / spec.file).stat().st_size, sha256(new / spec.file))
        added = replace(
            manifest,
            sinkprune_version=version("sinkprune"),
            budgets={**manifest.budgets, name: budget},
            plans={**manifest.plans, METHOD: {**manifest.plans.get(METHOD, {}), name: plan}},
            graphs=graphs | own,
            files=dict(sorted(files.items())),
        )
        BUNDLE.write(new, added, sign)
        BUNDLE.hold(new, added.files)
    return added
