"""A bundle on disk: a folder of graphs, weights and `bundle.json`, their manifest.

This module is the only reader and writer of `bundle.json`. Reading validates everything before anything is loaded:
the format version, every field, what the graphs take and give, and (`Bundle.verify`) every file's size and sha256.
"""

from __future__ import annotations

import os
from pathlib import Path

from sinkprune.contract.errors import BundleError
from sinkprune.contract.families import FAMILIES
from sinkprune.contract.folders import recover
from sinkprune.contract.graph_contract import check_interfaces
from sinkprune.contract.manifest import BUNDLE, CHAT_TEMPLATE, EMBEDDING, MANIFEST, TOKENIZER, Manifest
from sinkprune.contract.manifest_file import Folder
from sinkprune.contract.trust import ANY, Trust


class Bundle(Folder[Manifest]):
    """A bundle that was read: where it lies, what its manifest says, and its files, held open."""

    kind = BUNDLE

    def graph_path(self, graph: str) -> Path:
        """The path of the ONNX file of the graph that bears this name in the manifest."""
        return self.path / self.manifest.graphs[graph].file


def read_bundle(path: str | os.PathLike[str], trust: Trust = ANY) -> Bundle:
    """The bundle at `path`: its manifest validated, and every file present at its size and held open.

    Raises `BundleError`, also for a manifest that is not the one that `trust` expects. The files' sums are not
    compared: see `Bundle.verify`.
    """
    root = Path(path)
    recover(root, BUNDLE)
    manifest, sha256 = BUNDLE.read(root, Manifest, trust)
    _check_consistent(root / MANIFEST, manifest)
    return Bundle(root, manifest, sha256, BUNDLE.hold(root, manifest.files), trust)


def _check_consistent(path: Path, manifest: Manifest) -> None:
    """Refuse a manifest whose parts do not fit each other, or whose files lie outside the bundle."""
    if manifest.family not in FAMILIES:
        raise BundleError(
            f"'{path}' is of family '{manifest.family}', expected one of: {', '.join(FAMILIES)}. Upgrade sinkprune."
        )
    lm = manifest.language_model
    if lm.rope_sections and sum(lm.rope_sections) != lm.head_dim // 2:
        raise BundleError(
            f"'{path}' has the rope_sections {list(lm.rope_sections)}, expected numbers that add up to "
            f"{lm.head_dim // 2}, half of head_dim. Export the bundle again."
        )
    decoders = (f"decoder_{segment}" for segment in range(len(manifest.segments)))
    plans = [(name, plan) for budgets in manifest.plans.values() for name, plan in budgets.items()]
    selections = [graph for _, plan in plans for graph in plan.graphs]
    projector = [] if manifest.projector is None else [manifest.projector]
    used = dict.fromkeys(["vision", *projector, *decoders, "head", *selections])
    for graph in used:
        if graph not in manifest.graphs:
            raise BundleError(f"'{path}' lacks the graph '{graph}'. Export the bundle again.")
    cuts = {str(layer) for layer in manifest.cut_after}
    for name, plan in plans:
        if plan.counts is None and (name not in manifest.budgets or not manifest.any_resolution):
            raise BundleError(
                f"'{path}' holds a plan at budget '{name}' without counts, and no shares to take instead. "
                "Export the bundle again."
            )
        most = manifest.most_visual_tokens
        chooses = plan.counts.kept != most if plan.counts else manifest.budgets[name].sanitizer
        if chooses and plan.sanitizer is None:
            raise BundleError(
                f"'{path}' holds a plan at budget '{name}' that keeps some of the tokens, and no sanitizer to choose "
                "them. Export the bundle again."
            )
        stages = (plan.counts or manifest.budgets[name]).stages
        if not cuts.issuperset(plan.select_after) or len(plan.select_after) != len(stages):
            raise BundleError(
                f"'{path}' holds a plan that selects after layers {', '.join(plan.select_after)} with "
                f"{len(stages)} counts; the decoder is cut after {', '.join(sorted(cuts, key=int))}. "
                "Export the bundle again."
            )
    needed = [EMBEDDING, TOKENIZER, CHAT_TEMPLATE, *(graph.file for graph in manifest.graphs.values())]
    unlisted = [name for name in needed if name not in manifest.files]
    if unlisted:
        raise BundleError(f"'{path}' has no size and sha256 for '{unlisted[0]}'. Export the bundle again.")
    check_interfaces(path, manifest)
    unused = [graph for graph in manifest.graphs if graph not in used]
    if unused:
        raise BundleError(f"'{path}' holds the graph '{unused[0]}', which nothing runs. Export the bundle again.")
