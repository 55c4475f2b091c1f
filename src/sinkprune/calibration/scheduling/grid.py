"""The sanitizers and the sizes of stages that are tried: those of the family's own budgets, and many between."""

from __future__ import annotations

import numpy as np

from sinkprune.contract.budgets import Budget, Share
from sinkprune.contract.families import FAMILIES
from sinkprune.contract.manifest import Manifest

SANITIZERS = 14
SIZES = 32
_LEAST, _MOST = 0.02, 0.8
"""Of a picture's tokens."""
_OF_ANY = 1000
"""What shares are of, where pictures differ in their number of tokens."""


def denominator(manifest: Manifest) -> int:
    """What shares are of: a group's tokens, where all groups have as many."""
    return _OF_ANY if manifest.any_resolution else manifest.most_visual_tokens


def sanitizers(manifest: Manifest) -> list[Budget]:
    """Budgets without stages. Of what they keep as much is salient as in the family's budget that keeps nearest to
    as much."""
    whole, rows = denominator(manifest), FAMILIES[manifest.family].budgets.values()
    own = {_share(budget.reserve) + _share(budget.diverse): _share(budget.reserve) for budget in rows}
    found = [Budget(budget.reserve, budget.diverse, ()) for budget in rows]
    for kept in np.geomspace(_LEAST, _MOST, SANITIZERS):
        nearest = min(own, key=lambda share: abs(share - kept))
        chosen = max(2, round(whole * float(kept)))
        reserve = min(max(1, round(chosen * own[nearest] / nearest)), chosen - 1)
        found.append(Budget(Share(reserve, whole), Share(chosen - reserve, whole), ()))
    # Of the grid some are among the family's.
    return [*dict.fromkeys(found)]


def sizes(manifest: Manifest) -> list[Share]:
    """What a stage may leave, the smallest first."""
    whole = denominator(manifest)
    between = {max(1, round(whole * float(left))) for left in np.geomspace(_LEAST / 2, _MOST, SIZES)}
    own = {stage.of(whole) for budget in FAMILIES[manifest.family].budgets.values() for stage in budget.stages}
    return [Share(left, whole) for left in sorted(between | own)]


def _share(part: Share) -> float:
    return part.numerator / part.denominator
