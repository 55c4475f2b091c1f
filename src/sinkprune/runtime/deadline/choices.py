"""The budgets that a request may run at, and what each keeps of its pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.checks.format_value import counted
from sinkprune.contract.engines_manifest import Limits
from sinkprune.contract.errors import PromptError, PruningError
from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.schedule import Schedule, schedule
from sinkprune.runtime.steps.context_length import check_length
from sinkprune.runtime.steps.request import Request


class ScheduledBudget(NamedTuple):
    """A budget, and what it keeps."""

    budget: str
    schedule: Schedule
    rows: int
    """The visual rows of all decoder layers together: how large the budget is."""


def scheduled_budget(
    manifest: Manifest, method: str, budget: str, layouts: Sequence[VisualLayout]
) -> ScheduledBudget:
    """Return what `budget` keeps of pictures of these `layouts`; raises `BudgetError` for an unknown budget."""
    planned = schedule(manifest, method, budget, layouts)
    return ScheduledBudget(budget, planned, sum(planned.per_layer(manifest.language_model.num_layers)))


def budgets_up_to(
    manifest: Manifest, method: str, budget: str, layouts: Sequence[VisualLayout]
) -> list[ScheduledBudget]:
    """Return `budget` and all budgets of `method` that keep no more of pictures of these `layouts`.

    Raises `BudgetError` for an unknown method or budget.
    """
    most = scheduled_budget(manifest, method, budget, layouts).rows
    every = [scheduled_budget(manifest, method, name, layouts) for name in (UNPRUNED, *manifest.plans[method])]
    return [choice for choice in every if choice.rows <= most]


def runnable(
    manifest: Manifest,
    limits: Limits | None,
    request: Request,
    choices: Iterable[ScheduledBudget],
    text: int,
    layouts: Sequence[VisualLayout],
) -> list[ScheduledBudget]:
    """Return the `choices` at which a request with `text` tokens of text can run, the largest first.

    Raises the `PromptError` or `PruningError` of the last choice where none can run.
    """
    found, refusal = [], None
    for choice in choices:
        try:
            check_length(manifest, limits, request, text, choice.schedule.rows, layouts)
            _check_pruning(choice.schedule, layouts, manifest.language_model.num_layers)
        except (PromptError, PruningError) as error:
            refusal = error
        else:
            found.append(choice)
    if not found and refusal is not None:
        raise refusal
    return sorted(found, key=lambda choice: -choice.rows)


def _check_pruning(planned: Schedule, layouts: Sequence[VisualLayout], num_layers: int) -> None:
    """Reject a plan that would drop nothing; raises `PruningError`."""
    left = planned.reaching(num_layers)
    drops = planned.plan is not None and planned.plan.picture_share is None
    if drops and not layouts:
        raise PruningError(
            f"pruning was asked for, and the request has no picture. Leave out the budget, or give '{UNPRUNED}'."
        )
    varies = planned.plan is not None and planned.plan.evidence is not None
    if drops and not varies and left == sum(layout.all_tokens for layout in layouts):
        raise PruningError(
            f"pruning was asked for and nothing was pruned: the image has {counted(left, 'visual token')} and "
            f"the budget keeps as many. Use budget '{UNPRUNED}', or a smaller one."
        )
