"""The grid of the search: the sanitizers and stage sizes of the family's budgets, and many between them."""

from __future__ import annotations

import numpy as np

from sinkprune.contract.budgets import Budget, Share
from sinkprune.contract.families import FAMILIES
from sinkprune.contract.manifest import Manifest

_SANITIZERS, _SIZES = 14, 32
"""Points of the grid besides the family's own."""
_LEAST, _MOST = 0.02, 0.8
"""Shares of a picture's tokens."""


def _denominator(manifest: Manifest) -> int:
    """Return the denominator of shares: the tokens of a group, or 1000 if groups differ."""
    return 1000 if manifest.any_resolution else manifest.most_visual_tokens


def sanitizers(manifest: Manifest) -> list[Budget]:
    """Return budgets without stages, each with the share of salient tokens of the family's nearest budget."""
    whole, rows = _denominator(manifest), FAMILIES[manifest.family].budgets.values()
    own = {_share(budget.reserve) + _share(budget.diverse): _share(budget.reserve) for budget in rows}
    found = [Budget(budget.reserve, budget.diverse, ()) for budget in rows]
    for kept in np.geomspace(_LEAST, _MOST, _SANITIZERS):
        nearest = min(own, key=lambda share: abs(share - kept))
        chosen = max(2, round(whole * float(kept)))
        reserve = min(max(1, round(chosen * own[nearest] / nearest)), chosen - 1)
        found.append(Budget(Share(reserve, whole), Share(chosen - reserve, whole), ()))
    # The grid may repeat the family's, in other fractions. The first of equal counts stays: the family's.
    by_counts: dict[tuple[int, int], Budget] = {}
    for budget in found:
        by_counts.setdefault((budget.reserve.of(whole), budget.diverse.of(whole)), budget)
    return [*by_counts.values()]


def sizes(manifest: Manifest) -> list[Share]:
    """Return the shares of tokens that a stage may keep, ascending."""
    whole = _denominator(manifest)
    between = {max(1, round(whole * float(left))) for left in np.geomspace(_LEAST / 2, _MOST, _SIZES)}
    own = {stage.of(whole) for budget in FAMILIES[manifest.family].budgets.values() for stage in budget.stages}
    return [Share(left, whole) for left in sorted(between | own)]


def _share(part: Share) -> float:
    return part.numerator / part.denominator
