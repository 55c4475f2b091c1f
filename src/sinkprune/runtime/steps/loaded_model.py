"""The parts of a loaded bundle that a request runs on."""

from __future__ import annotations

from typing import NamedTuple

from sinkprune.contract.budgets import AUTO
from sinkprune.contract.engines_manifest import Limits
from sinkprune.contract.errors import UsageError
from sinkprune.contract.manifest import Manifest
from sinkprune.runtime.families import Family
from sinkprune.runtime.steps.chain import Chain
from sinkprune.runtime.steps.embedding import Embedding
from sinkprune.runtime.steps.picture_warnings import PictureWarnings
from sinkprune.runtime.steps.request import Request
from sinkprune.runtime.text.prompt import PromptEncoder


class LoadedModel(NamedTuple):
    """A bundle on a backend: what preprocesses, tokenizes, embeds and computes."""

    manifest: Manifest
    limits: Limits | None
    """Limits of the engines; None for graphs, which have none."""
    family: Family
    prompts: PromptEncoder
    embedding: Embedding
    chain: Chain
    warnings: PictureWarnings

    def for_request(self, request: Request) -> LoadedModel:
        """Return the model that sees the pictures of `request` at their size at its budget.

        Raises `BudgetError` for an unknown method or budget, and `UsageError` where the budget is chosen after the
        tower has run, and the tower needs it.
        """
        plans, plan = self.manifest.plans.get(request.method, {}), None
        if request.budget != AUTO:
            plan = self.manifest.plan(request.method, request.budget)
        if not any(each.picture_share for each in plans.values()):
            return self
        if request.budget == AUTO or request.deadline_ms is not None:
            raise UsageError(
                f"method '{request.method}' makes pictures smaller before the vision tower runs, and budget '{AUTO}' "
                "and deadlines choose a budget afterwards. Give one budget and no deadline, or another method."
            )
        share = plan.picture_share if plan is not None else None
        return self if share is None else self._replace(family=self.family.smaller(share))
