"""The budgets that a request may run at, and what each keeps of its pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.engines_manifest import Limits
from sinkprune.contract.errors import PromptError, PruningError
from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.schedule import Schedule, schedule
from sinkprune.runtime.steps.context_length import check_length
from sinkprune.runtime.steps.request import Request


class Choice(NamedTuple):
    """A budget, and what it keeps."""

    budget: str
    schedule: Schedule


def up_to(manifest: Manifest, method: str, budget: str, layouts: Sequence[VisualLayout]) -> list[str]:
    """The budgets of `method` that keep no more of pictures of these `layouts` than `budget` does, itself among them.

    Raises `BudgetError` for what the bundle does not hold.
    """
    most = _work(manifest, schedule(manifest, method, budget, layouts))
    others = [UNPRUNED, *manifest.plans[method]]
    kept = {name: _work(manifest, schedule(manifest, method, name, layouts)) for name in others}
    return [name for name in others if kept[name] <= most]


def choices(
    manifest: Manifest,
    limits: Limits | None,
    request: Request,
    budgets: Sequence[str],
    text: int,
    layouts: Sequence[VisualLayout],
) -> list[Choice]:
    """Those of `budgets` at which a request with so many `text` tokens can run, the largest first.

    Raises `PromptError` and `PruningError` where none is left: what is wrong with the last.
    """
    found, refusal = [], None
    for budget in budgets:
        planned = schedule(manifest, request.method, budget, layouts)
        try:
            check_length(manifest, limits, request, text, planned.rows, layouts)
            _check_pruning(planned, layouts, manifest.language_model.num_layers)
        except (PromptError, PruningError) as error:
            refusal = error
        else:
            found.append(Choice(budget, planned))
    if not found and refusal is not None:
        raise refusal
    return sorted(found, key=lambda choice: -_work(manifest, choice.schedule))


def _work(manifest: Manifest, planned: Schedule) -> int:
    """Visual rows of all layers."""
    return sum(map(planned.reaching, range(manifest.language_model.num_layers)))


def _check_pruning(planned: Schedule, layouts: Sequence[VisualLayout], num_layers: int) -> None:
    """Refuse a plan that would drop nothing; raises `PruningError`."""
    left = planned.reaching(num_layers)
    if planned.plan is not None and left == sum(layout.all_tokens for layout in layouts):
        raise PruningError(
            f"pruning was asked for and nothing was pruned: the image has {left} visual tokens and the budget "
            f"keeps as many. Use budget '{UNPRUNED}', or a smaller one."
        )
