"""Trial plans: a bundle in memory with additional plans, whose graphs are in a temporary folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sinkprune.contract.budgets import Budget
from sinkprune.contract.bundle import Bundle
from sinkprune.contract.errors import BundleError
from sinkprune.contract.files.folders import naming_full
from sinkprune.contract.files.held_files import HeldFile
from sinkprune.contract.files.manifest_file import FileSpec, sha256
from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.towers import QwenTower
from sinkprune.export.dialects import DIALECTS
from sinkprune.export.methods.sinkpruner import build_after
from sinkprune.export.planning import save_plan
from sinkprune.export.precision import PRECISIONS
from sinkprune.export.pruning.plan import PlanFacts, VariableTokens
from sinkprune.runtime.families import load_family

TRIAL = "trial"
"""The method of trial plans in memory: SinkPruner with other counts."""


class Trials:
    """A bundle whose method `TRIAL` has the plans that are added; its own folder stays unchanged."""

    def __init__(self, bundle: Bundle, folder: Path) -> None:
        """Write graphs to `folder`, which the caller removes."""
        own = bundle.manifest
        self._folder, self._files = folder, dict(bundle.files)
        manifest = replace(
            own,
            budgets=dict(own.budgets),
            plans={**own.plans, TRIAL: {}},
            graphs=dict(own.graphs),
            files=dict(own.files),
        )
        self.facts = plan_facts(manifest)
        self.bundle = Bundle(bundle.path, manifest, bundle.sha256, self._files, bundle.trust)
        """The bundle to load a pipeline from; the pipeline also finds plans that are added later."""

    def add(self, name: str, budget: Budget, cuts: Sequence[int]) -> None:
        """Add SinkPruner's plan of `budget` under `name`, with its stages after the layers `cuts`.

        Raises `BudgetError` for a plan that cannot be built.
        """
        manifest = self.bundle.manifest
        with naming_full(self._folder):
            plan, graphs = save_plan(self._folder, self.facts, TRIAL, name, build_after(self.facts, budget, cuts))
        for spec in graphs.values():
            path = self._folder / spec.file
            self._files[spec.file] = HeldFile(path, lambda reason: BundleError(f"a trial graph {reason}"))
            manifest.files[spec.file] = FileSpec(path.stat().st_size, sha256(path))
        manifest.graphs.update(graphs)
        manifest.budgets[name] = budget
        manifest.plans[TRIAL][name] = plan


def plan_facts(manifest: Manifest) -> PlanFacts:
    """Return the facts of the model from which the export built the bundle's plans."""
    outputs = {tensor.name: tensor.shape for tensor in manifest.graphs["vision"].outputs}
    largest: Sequence[VisualLayout] = [*load_family(manifest).largest().values()]
    groups, in_all = max(one.groups for one in largest), max(one.all_tokens for one in largest)
    tokens: int | VariableTokens = manifest.most_visual_tokens
    if manifest.any_resolution:
        tower = manifest.tower(QwenTower)
        tokens = VariableTokens(manifest.most_visual_tokens, (tower.patch_size * tower.merge_size) ** 2, in_all)
    return PlanFacts(
        language_model=manifest.language_model,
        tokens=tokens,
        visual_width=outputs["tokens"][-1],
        precision=PRECISIONS[manifest.precision],
        dialect=DIALECTS[manifest.dialect],
        groups=groups,
        images=manifest.max_images,
        joined=manifest.any_resolution and groups > 1,
        deepstack=manifest.deepstack_width // outputs["tokens"][-1],
    )
