"""How many tokens to take out as outliers: where a gap parts them from all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sinkprune.contract.precision import Array

OUTLIER = 2.0
"""Norm, in median norms of its group, from which a token counts as an outlier."""
GAP = 1.25
"""How many times the next smaller norm the smallest outlier has at least."""
MOST = 0.05
"""The most of a group's tokens that can be outliers: five times the paper's share."""


class Gap(NamedTuple):
    """What parts the outliers of one group from its other tokens; norms in medians of the group."""

    outliers: int
    below: float
    """The largest norm of the others."""
    above: float
    """The smallest norm of the outliers."""


class Suggestion(NamedTuple):
    """rho for a tower's budgets."""

    per_mille: int
    """So many tokens of 1000, rounded up; 0 where none should be taken out."""
    reason: str
    """In words."""


def find_gap(norms: Array) -> Gap | None:
    """The lowest gap among the largest norms of one group [N]; None where there is none.

    A gap lies below a token that has `OUTLIER` medians or more, `GAP` times the next smaller norm or more, and no
    more than `MOST` of the tokens, one at least, from it upwards.
    """
    ordered = np.sort(norms) / np.median(norms)
    most = min(max(1, int(MOST * ordered.size)), ordered.size - 1)
    for place in range(ordered.size - most, ordered.size):
        below, above = float(ordered[place - 1]), float(ordered[place])
        if above >= OUTLIER and above >= GAP * below:
            return Gap(ordered.size - place, below, above)
    return None


def suggest_rho(norms: Sequence[Array]) -> Suggestion:
    """rho from the `norms` [N] of all groups, each with a median above 0.

    Where half of the groups or more have a gap it is the share of all tokens that lie above one, rounded down to a
    whole per mille, as a budget rounds its count up: on groups of up to 1000 tokens with as many outliers each,
    exactly those are taken out.
    """
    found = [find_gap(group) for group in norms]
    gaps = [gap for gap in found if gap is not None]
    where = f"outliers in {len(gaps)} of {len(norms)} groups of tokens"
    if 2 * len(gaps) < len(norms):
        rule = (
            f"norms of {OUTLIER:g} medians or more, {GAP:g} times the next, of at most {100 * MOST:g} % of the tokens"
        )
        return Suggestion(0, f"remove no token (budgets with +keep-outliers); found {where} ({rule}).")
    share = sum(gap.outliers for gap in gaps) / sum(group.size for group in norms)
    per_mille = max(1, int(1000 * share))
    below, above = (float(np.median([getattr(gap, side) for gap in gaps])) for side in ("below", "above"))
    return Suggestion(
        per_mille,
        f"rho {per_mille / 10:g} % (budgets {_as_options(per_mille)}); found {where}, "
        f"{100 * share:.2f} % of all tokens, above a gap from {below:.1f} to {above:.1f} medians.",
    )


def _as_options(per_mille: int) -> str:
    return f"with +rho-{per_mille}" if per_mille != 10 else "as they are"
