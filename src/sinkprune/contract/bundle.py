"""Bundles on the disk: only this module reads `bundle.json`.

Reading validates the format version, every field, the graphs' inputs and outputs, and every file's size, before
anything is loaded. `verify` compares every sha256.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sinkprune.contract.budgets import BARLESS_TOWER, FAMILIES, OTHER_TOWERS, TOWER, Budget, Plan, is_tower
from sinkprune.contract.errors import BundleError
from sinkprune.contract.files.folders import recover
from sinkprune.contract.files.manifest_file import Folder
from sinkprune.contract.files.trust import ANY, Trust
from sinkprune.contract.files.untrusted import MANIFEST_BYTES
from sinkprune.contract.graph_contract import contract_violations
from sinkprune.contract.manifest import BESIDE_GRAPHS, BUNDLE, BUNDLE_FOLDER, ENGINES_MANIFEST, MANIFEST, Manifest
from sinkprune.contract.progress import OnProgress, unreported

if TYPE_CHECKING:
    from sinkprune.contract.engines_manifest import Engines


@dataclass(frozen=True)
class Bundle(Folder[Manifest]):
    """A bundle that was read: its place, its manifest, and its files, held open."""

    kind = BUNDLE
    engines: Engines | None = None
    """The engines that run instead of graphs, if the bundle is part of a folder of engines; else None."""

    def verify(self, progress: OnProgress = unreported) -> None:
        """Compare every file with its sha256.

        For a bundle in a folder of engines, these are the files of the engines. Raises `BundleError`, `EnginesError`.
        """
        if self.engines is None:
            super().verify(progress)
        else:
            self.engines.verify(progress)


def read_bundle(path: str | os.PathLike[str], trust: Trust = ANY, *, whole: bool = True) -> Bundle:
    """Return the bundle at `path`: its manifest validated, and every file of its size and held open.

    Files may be missing unless the bundle must be `whole`: `sinkprune-build --move` removes them one by one.
    `Bundle.verify` compares the sums. Raises `BundleError`, also for a manifest other than `trust` expects, and for a
    folder of engines, which holds no graphs.
    """
    root = Path(path)
    recover(root, BUNDLE)
    if os.path.lexists(root / ENGINES_MANIFEST):
        raise BundleError(
            f"'{root}' is a folder of engines, and this needs the bundle that they were built from. Give that one."
        )
    manifest, sha256 = BUNDLE.read(root, Manifest, trust)
    _check_consistent(root / MANIFEST, manifest)
    return Bundle(root, manifest, sha256, BUNDLE.hold(root, manifest.files, whole=whole), trust)


def read_runnable(path: str | os.PathLike[str], trust: Trust = ANY) -> Bundle:
    """Return the bundle at `path`, or the bundle in the folder of engines at `path`.

    `trust` applies to the folder's own manifest, `bundle.json` or `engines.json`. Raises `BundleError` and
    `EnginesError`, as `read_bundle` and `read_engines` do.
    """
    root = Path(path)
    if os.path.lexists(root) and not os.path.lexists(root / ENGINES_MANIFEST):
        return read_bundle(root, trust)
    from sinkprune.contract.engines_manifest import ENGINES, read_engines

    recover(root, ENGINES)
    if not os.path.lexists(root / ENGINES_MANIFEST):
        return read_bundle(root, trust)
    return _came_with(read_engines(root, trust))


def _came_with(engines: Engines) -> Bundle:
    """Return the bundle in a folder of engines: manifest, tokenizer, chat template and embedding, without graphs."""
    root, kind = engines.path / BUNDLE_FOLDER, engines.kind
    files = {
        name.removeprefix(f"{BUNDLE_FOLDER}/"): file
        for name, file in engines.files.items()
        if name.startswith(f"{BUNDLE_FOLDER}/")
    }
    lacking = [name for name in (MANIFEST, *BESIDE_GRAPHS) if name not in files]
    if lacking:
        raise kind.error(f"the engines '{engines.path}' came without '{lacking[0]}' of a bundle. {kind.again}")
    data = files.pop(MANIFEST).read(MANIFEST_BYTES)
    sha256 = hashlib.sha256(data).hexdigest()
    if sha256 != engines.manifest.bundle_sha256:
        raise kind.error(
            f"'{root / MANIFEST}' has the sha256 {sha256}, but the engines next to it were built from a bundle of "
            f"{engines.manifest.bundle_sha256}. {kind.again}"
        )
    manifest = BUNDLE.parsed(root / MANIFEST, data, Manifest)
    _check_consistent(root / MANIFEST, manifest)
    return Bundle(engines.path, manifest, sha256, files, engines.trust, engines)


def _check_consistent(path: Path, manifest: Manifest) -> None:
    """Reject a manifest of an unknown family, or whose parts contradict each other."""
    if manifest.family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise BundleError(f"'{path}' is of family '{manifest.family}', expected one of: {known}. {BUNDLE.upgrade}")
    BUNDLE.check_consistent(path, _complaints(manifest))


def _complaints(manifest: Manifest) -> Iterator[str]:
    """Yield each contradiction in a manifest. Read the first only, because later checks rely on earlier ones."""
    lm = manifest.language_model
    if lm.rope_sections and sum(lm.rope_sections) != lm.head_dim // 2:
        sections, half = list(lm.rope_sections), lm.head_dim // 2
        yield f"has the rope_sections {sections}, expected numbers that add up to {half}, half of head_dim"
    decoders = (f"decoder_{segment}" for segment in range(len(manifest.segments)))
    plans = [(name, plan) for budgets in manifest.plans.values() for name, plan in budgets.items()]
    projector = [] if manifest.projector is None else [manifest.projector]
    selections = [graph for _, plan in plans for graph in plan.graphs]
    towers = [TOWER, *(plan.tower for _, plan in plans if plan.tower is not None)]
    if not all(map(is_tower, towers)):
        yield f"runs the vision towers {', '.join(towers)}, expected {' or '.join((TOWER, *OTHER_TOWERS.values()))}"
    used = dict.fromkeys([*towers, *projector, *decoders, manifest.last_graph, *manifest.policy_graphs, *selections])
    for graph in used:
        if graph not in manifest.graphs:
            yield f"lacks the graph '{graph}'"
    for name, plan in plans:
        yield from _complaints_of_plan(manifest, f"holds a plan at budget '{name}' that", plan)
    for file in (*BESIDE_GRAPHS, *(graph.file for graph in manifest.graphs.values())):
        if file not in manifest.files:
            yield f"has no size and sha256 for '{file}'"
    yield from contract_violations(manifest)
    if manifest.deepstack_width == 0 and any(t.name == "deepstack" for t in manifest.graphs["vision"].outputs):
        yield "has a graph 'vision' that gives 'deepstack', which graph 'decoder_0' does not take"
    for graph in manifest.graphs:
        if graph not in used:
            yield f"holds the graph '{graph}', which nothing runs"


def _complaints_of_plan(manifest: Manifest, what: str, plan: Plan) -> Iterator[str]:
    has_shares = manifest.any_resolution or plan.tower == BARLESS_TOWER
    kept, other = (plan.shares, plan.counts) if has_shares else (plan.counts, plan.shares)
    if kept is None or other is not None:
        yield f"{what} must have {'shares and no counts' if has_shares else 'counts and no shares'}"
        return
    chooses = kept.sanitizer if isinstance(kept, Budget) else kept.kept != manifest.tokens_of(plan)
    if chooses and plan.sanitizer is None:
        yield f"{what} keeps some of the tokens, and no sanitizer to choose them"
    cuts = [str(layer) for layer in sorted(manifest.cut_after)]
    if not set(cuts).issuperset(plan.select_after) or len(plan.select_after) != len(kept.stages):
        yield (
            f"{what} selects after layers {', '.join(plan.select_after)} with {len(kept.stages)} counts; the decoder "
            f"is cut after {', '.join(cuts)}"
        )
