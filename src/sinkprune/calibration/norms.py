"""A report of a vision tower's norms and salience: does it have the outliers that the visual sanitizer removes?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sinkprune.calibration.evaluation.sample_size import mean_warnings
from sinkprune.calibration.outlier_gap import OUTLIER, suggest_rho
from sinkprune.calibration.sink_tokens import sink_tokens
from sinkprune.contract.errors import NumericsError

_BINS = 60
_FEW = 0.05


@dataclass(frozen=True)
class NormReport:
    """Norms of a tower's tokens over some pictures, each group's in units of its median."""

    model: str
    """The checkpoint's name."""
    pictures: int
    """Measured pictures."""
    tokens: int
    """Visual tokens of all pictures."""
    histogram: tuple[int, ...]
    """Tokens with a norm between each two `edges`."""
    edges: tuple[float, ...]
    """The bounds of the histogram's bins, ascending, one more than bins; in median norms."""
    largest: float
    """The largest norm, in median norms of its group."""
    outlier_share: float
    """The fraction of the tokens whose norm is at least `OUTLIER` medians."""
    top_overlap: float
    """Of the 1 % of a group's tokens with the largest norms, the share that is in the most salient 1 % too."""
    chance_overlap: float
    """What `top_overlap` would be if norm and salience had nothing to do with each other."""
    top_salience_share: float
    """The share of the salience on the 1 % of tokens with the largest norms."""
    norm_salience_correlation: float
    """Spearman's rank correlation of a group's norms and salience, mean over groups."""
    verdict: str
    """Whether the tower has the outliers that the paper describes, in words."""
    suggested_per_mille: int
    """rho for the tower's budgets, from a gap in its norms (`outlier_gap.suggest_rho`); 0 removes none."""
    suggestion: str
    """The same in words, with the reason."""
    warnings: tuple[str, ...]
    """Sentences: why the figures say little, for example too few pictures."""
    seen_share: float = 1.0
    """The share of its area that the model sees of the picture that it sees least of."""


def summarise(
    model: str, pictures: int, norms: Sequence[NDArray[np.float32]], salience: Sequence[NDArray[np.float32]]
) -> NormReport:
    """Return the report of `norms` and `salience` [N] of all groups of some pictures; groups may differ in N.

    Raises `NumericsError` for values that are not finite, and for a group whose norms or salience are zero.
    """
    _check_comparable(norms, salience)
    scaled = np.concatenate([group / np.median(group) for group in norms])
    # As many of the most salient tokens as there are sink tokens.
    sinks, salient = ([sink_tokens(group[None])[0] for group in groups] for groups in (norms, salience))
    overlap = float(np.mean([(a & b).sum() / a.sum() for a, b in zip(sinks, salient, strict=True)]))
    chance = float(np.mean([marked.mean() for marked in sinks]))
    share, top = float((scaled >= OUTLIER).mean()), float(scaled.max())
    received = [group[marked].sum() / group.sum() for group, marked in zip(salience, sinks, strict=True)]
    suggestion = suggest_rho(norms)
    histogram, edges = np.histogram(scaled, bins=_BINS, range=(0.0, max(3.0, top)))
    return NormReport(
        model=model,
        pictures=pictures,
        tokens=scaled.size,
        histogram=tuple(histogram.tolist()),
        edges=tuple(edges.tolist()),
        largest=top,
        outlier_share=share,
        top_overlap=overlap,
        chance_overlap=chance,
        top_salience_share=float(np.mean(received)),
        norm_salience_correlation=_mean_spearman(norms, salience),
        verdict=_verdict(share, top, attended=overlap > 2 * chance),
        suggested_per_mille=suggestion.per_mille,
        suggestion=suggestion.reason,
        warnings=mean_warnings(pictures),
    )


def _check_comparable(norms: Sequence[NDArray[np.float32]], salience: Sequence[NDArray[np.float32]]) -> None:
    for what, groups, middle in (("norms", norms, np.median), ("salience", salience, np.sum)):
        if not all(np.isfinite(group).all() and middle(group) > 0 for group in groups):
            raise NumericsError(
                f"the vision tower's {what} are not finite, or nothing but zeros, so there are no outliers to "
                "look for. Check the checkpoint's weights."
            )


def _verdict(share: float, largest: float, *, attended: bool) -> str:
    if share == 0:
        return f"No outliers: no token reaches {OUTLIER:g} times its picture's median norm (largest {largest:.1f})."
    found = (
        f"{100 * share:.2f} % of the tokens have {OUTLIER:g} times their picture's median norm or more (largest "
        f"{largest:.1f})"
    )
    if attended and share <= _FEW:
        return f"Outliers as the paper describes them: {found}, and they draw the tower's attention."
    why = "they are too many to be outliers" if attended else "they do not draw the tower's attention"
    return f"Not the outliers the paper describes: {found}, but {why}."


def _mean_spearman(norms: Sequence[NDArray[np.float32]], salience: Sequence[NDArray[np.float32]]) -> float:
    """Return the mean over groups of two tokens or more; 0 without such groups."""
    pairs = [pair for pair in zip(norms, salience, strict=True) if len(pair[0]) > 1]
    return float(np.mean([_spearman(*pair) for pair in pairs])) if pairs else 0.0


def _spearman(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Return the rank correlation. Ties, which are rare among floats, are broken by position."""
    ranks = [np.argsort(np.argsort(x, kind="stable"), kind="stable") for x in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])
