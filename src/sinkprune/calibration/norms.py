"""The norms of a tower's tokens, and the outliers among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sinkprune.calibration.evaluation.statistics import mean_warnings
from sinkprune.contract.budgets import Budget
from sinkprune.contract.errors import NumericsError
from sinkprune.contract.precision import Array
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.steps.chain import run_tower


@dataclass(frozen=True)
class TokenFeatures:
    """Norms and salience of G groups of N tokens, and the place of each on the picture."""

    picture: Image.Image
    """The RGB picture; boxes are in its pixels."""
    boxes: Array
    """[G*N,4] float: left, top, right, bottom of each token."""
    views: tuple[range, ...]
    """Sets of tokens that cover the picture once, for drawing."""
    norms: Array
    """[G,N] fp32: the norm of each token."""
    salience: Array
    """[G,N] fp32: the attention each token receives."""


def bundle_features(pipeline: Pipeline, image: Image.Image) -> TokenFeatures:
    """Return the features of an RGB image in a bundle's tower; raises `ImageError` and `NumericsError`."""
    layout = pipeline.family.layout(image)
    tower = run_tower(pipeline.chain, pipeline.family.inputs(image), Stopwatch(pipeline.backend))
    return TokenFeatures(image, layout.boxes, layout.views, tower.norms, tower.salience)


OUTLIER_PER_MILLE = Budget.outlier_per_mille
"""rho: the sink tokens in 1000 tokens of a group, rounded up."""


def sink_tokens(norms: Array) -> Array:
    """Return [G,N] bool: the ceil(rho*N) largest `norms` [G,N] of each group, ties to the earlier token."""
    return mark_largest(norms, -(-norms.shape[1] * OUTLIER_PER_MILLE // 1000))


def mark_largest(values: Array, count: int) -> Array:
    """Return [G,N] bool: the `count` largest of each row, ties to the earlier."""
    marked = np.zeros(values.shape, bool)
    np.put_along_axis(marked, np.argsort(-values, axis=1, kind="stable")[:, :count], True, axis=1)
    return marked


OUTLIER = 2.0
"""Norm, in median norms of its group, from which a token counts as an outlier."""
GAP = 1.25
"""The least ratio of the smallest outlier's norm to the next smaller norm."""
MOST = 0.05
"""The largest share of outliers in a group: five times the paper's share."""


def find_gap(norms: Array) -> tuple[int, float, float] | None:
    """Return the lowest gap among the largest norms of one group [N], or None.

    That is the number of outliers, and the norms below the gap and above it, in medians of the group. A gap is below
    a token with a norm of at least `OUTLIER` medians and at least `GAP` times the next smaller norm. At most a share
    of `MOST` of the tokens, or one token, is above the gap.
    """
    ordered = np.sort(norms) / np.median(norms)
    most = min(max(1, int(MOST * ordered.size)), ordered.size - 1)
    for place in range(ordered.size - most, ordered.size):
        below, above = float(ordered[place - 1]), float(ordered[place])
        if above >= OUTLIER and above >= GAP * below:
            return ordered.size - place, below, above
    return None


def suggest_rho(norms: Sequence[Array]) -> tuple[int, str]:
    """Return rho in per mille, 0 to remove none, and why, from the `norms` [N] of all groups with medians above 0.

    If half of the groups or more have a gap, rho is the share of all tokens above one. It is rounded down to a whole
    per mille, because a budget rounds its count up. Groups of up to 1000 tokens with as many outliers each lose
    exactly those.
    """
    gaps = [gap for group in norms if (gap := find_gap(group))]
    where = f"outliers in {len(gaps)} of {len(norms)} groups of tokens"
    if 2 * len(gaps) < len(norms):
        rule = (
            f"norms of {OUTLIER:g} medians or more, {GAP:g} times the next, of at most {100 * MOST:g} % of the tokens"
        )
        return (0, f"remove no token (budgets with +keep-outliers); found {where} ({rule}).")
    outliers, below, above = zip(*gaps, strict=True)
    share = sum(outliers) / sum(group.size for group in norms)
    per_mille = max(1, int(1000 * share))
    options = f"with +rho-{per_mille}" if per_mille != 10 else "as they are"
    return (
        per_mille,
        f"rho {per_mille / 10:g} % (budgets {options}); found {where}, {100 * share:.2f} % of all tokens, above a "
        f"gap from {np.median(below):.1f} to {np.median(above):.1f} medians.",
    )


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
    """Spearman's rank correlation of a group's norms and salience, mean over groups of two tokens or more."""
    verdict: str
    """Whether the tower has the outliers that the paper describes, in words."""
    suggested_per_mille: int
    """rho for the tower's budgets, from a gap in its norms (`suggest_rho`); 0 removes none."""
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
    for what, groups, middle in (("norms", norms, np.median), ("salience", salience, np.sum)):
        if not all(np.isfinite(group).all() and middle(group) > 0 for group in groups):
            raise NumericsError(
                f"the vision tower's {what} are not finite, or nothing but zeros, so there are no outliers to "
                "look for. Check the checkpoint's weights."
            )
    scaled = np.concatenate([group / np.median(group) for group in norms])
    # As many of the most salient tokens as there are sink tokens.
    sinks, salient = ([sink_tokens(group[None])[0] for group in groups] for groups in (norms, salience))
    overlap = float(np.mean([(a & b).sum() / a.sum() for a, b in zip(sinks, salient, strict=True)]))
    chance = float(np.mean([marked.mean() for marked in sinks]))
    share, top = float((scaled >= OUTLIER).mean()), float(scaled.max())
    ranked = [_spearman(*pair) for pair in zip(norms, salience, strict=True) if len(pair[0]) > 1]
    received = [group[marked].sum() / group.sum() for group, marked in zip(salience, sinks, strict=True)]
    per_mille, reason = suggest_rho(norms)
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
        norm_salience_correlation=float(np.mean(ranked)) if ranked else 0.0,
        verdict=_verdict(share, top, attended=overlap > 2 * chance),
        suggested_per_mille=per_mille,
        suggestion=reason,
        warnings=mean_warnings(pictures),
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


def _spearman(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Return the rank correlation. Ties, which are rare among floats, are broken by position."""
    ranks = [np.argsort(np.argsort(x, kind="stable"), kind="stable") for x in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])
