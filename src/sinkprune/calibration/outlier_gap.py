"""The number of outliers to remove, from a gap between their norms and all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sinkprune.contract.precision import Array

OUTLIER = 2.0
"""Norm, in median norms of its group, from which a token counts as an outlier."""
GAP = 1.25
"""The least ratio of the smallest outlier's norm to the next smaller norm."""
MOST = 0.05
"""The largest share of outliers in a group: five times the paper's share."""


class OutlierGap(NamedTuple):
    """The gap between one group's outliers and its other tokens; norms in medians of the group."""

    outliers: int
    below: float
    """The largest norm of the others."""
    above: float
    """The smallest norm of the outliers."""


class RhoSuggestion(NamedTuple):
    """rho for a tower's budgets."""

    per_mille: int
    """Outliers in 1000 tokens, rounded down; 0 to remove none."""
    reason: str
    """The reason in words."""


def find_gap(norms: Array) -> OutlierGap | None:
    """Return the lowest gap among the largest norms of one group [N], or None.

    A gap is below a token with a norm of at least `OUTLIER` medians and at least `GAP` times the next smaller norm.
    At most a share of `MOST` of the tokens, or one token, is above the gap.
    """
    ordered = np.sort(norms) / np.median(norms)
    most = min(max(1, int(MOST * ordered.size)), ordered.size - 1)
    for place in range(ordered.size - most, ordered.size):
        below, above = float(ordered[place - 1]), float(ordered[place])
        if above >= OUTLIER and above >= GAP * below:
            return OutlierGap(ordered.size - place, below, above)
    return None


def suggest_rho(norms: Sequence[Array]) -> RhoSuggestion:
    """Suggest rho from the `norms` [N] of all groups, each with a median above 0.

    If half of the groups or more have a gap, rho is the share of all tokens above one. It is rounded down to a whole
    per mille, because a budget rounds its count up. Groups of up to 1000 tokens with as many outliers each lose
    exactly those.
    """
    found = [find_gap(group) for group in norms]
    gaps = [gap for gap in found if gap is not None]
    where = f"outliers in {len(gaps)} of {len(norms)} groups of tokens"
    if 2 * len(gaps) < len(norms):
        rule = (
            f"norms of {OUTLIER:g} medians or more, {GAP:g} times the next, of at most {100 * MOST:g} % of the tokens"
        )
        return RhoSuggestion(0, f"remove no token (budgets with +keep-outliers); found {where} ({rule}).")
    share = sum(gap.outliers for gap in gaps) / sum(group.size for group in norms)
    per_mille = max(1, int(1000 * share))
    below, above = (float(np.median([getattr(gap, side) for gap in gaps])) for side in ("below", "above"))
    return RhoSuggestion(
        per_mille,
        f"rho {per_mille / 10:g} % (budgets {_as_options(per_mille)}); found {where}, "
        f"{100 * share:.2f} % of all tokens, above a gap from {below:.1f} to {above:.1f} medians.",
    )


def _as_options(per_mille: int) -> str:
    return f"with +rho-{per_mille}" if per_mille != 10 else "as they are"
