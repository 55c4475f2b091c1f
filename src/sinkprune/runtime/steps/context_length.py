"""Checks that a request fits the model's context and the engines, and that pruning drops something."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.checks import counted
from sinkprune.contract.errors import PromptError, PruningError
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.schedule import Schedule, VisualLayout, schedule
from sinkprune.runtime.steps.request import Request

if TYPE_CHECKING:
    from sinkprune.contract.engines_manifest import Limits


def check_picture_count(manifest: Manifest, limits: Limits | None, pictures: int) -> None:
    """Reject more pictures than the bundle or its engines take; raises `PromptError`."""
    most = limits.images if limits else manifest.max_images
    if pictures > most:
        from sinkprune.runtime.steps.too_long import too_many_pictures

        raise too_many_pictures(manifest, limits, pictures, most)


def check_length(
    manifest: Manifest,
    limits: Limits | None,
    request: Request,
    text: int,
    visual: int,
    layouts: Sequence[VisualLayout],
) -> None:
    """Reject a request that is too long, with `text` tokens of text and `visual` rows; raises `PromptError`.

    `limits` are those of engines; None for graphs, which have none. `layouts` are those of the pictures.
    """
    if limits is not None:
        from sinkprune.runtime.steps.too_long import check_limits

        check_limits(manifest, limits, text, request.max_new_tokens)
    new, limit = request.max_new_tokens, manifest.language_model.max_positions
    if text + visual + new > limit:
        from sinkprune.runtime.steps.too_long import fewer_tokens, too_long_error

        budgets = manifest.plans[request.method]
        kept = {name: schedule(manifest, request.method, name, layouts).rows for name in budgets}
        raise too_long_error(text, visual, new, limit, kept, fewer_tokens(manifest, request.pictures))


def runnable(
    manifest: Manifest,
    limits: Limits | None,
    request: Request,
    schedules: Iterable[Schedule],
    text: int,
    layouts: Sequence[VisualLayout],
) -> list[Schedule]:
    """Return those of the `schedules`, in their order, at which a request with `text` tokens of text can run.

    Raises the `PromptError` or `PruningError` of the last where none can run.
    """
    found, refusal = [], None
    for planned in schedules:
        try:
            check_length(manifest, limits, request, text, planned.rows, layouts)
            _check_pruning(planned, layouts, manifest.language_model.num_layers)
        except (PromptError, PruningError) as error:
            refusal = error
        else:
            found.append(planned)
    if not found and refusal is not None:
        raise refusal
    return found


def _check_pruning(planned: Schedule, layouts: Sequence[VisualLayout], num_layers: int) -> None:
    left = planned.reaching(num_layers)
    drops = planned.plan is not None and planned.plan.picture_share is None
    if drops and not layouts:
        raise PruningError(
            f"pruning was asked for, and the request has no picture. Leave out the budget, or give '{UNPRUNED}'."
        )
    if drops and left == sum(layout.all_tokens for layout in layouts):
        raise PruningError(
            f"pruning was asked for and nothing was pruned: the image has {counted(left, 'visual token')} and "
            f"the budget keeps as many. Use budget '{UNPRUNED}', or a smaller one."
        )
