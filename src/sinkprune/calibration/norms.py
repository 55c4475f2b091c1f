"""The norms of a tower's tokens, and the outliers among them.

A file has one JSON object a line, with `cameras`, an object of paths by the names of the bundle's cameras, or a list
of paths in the order of the policy's training; `instruction`; and `state`, a list of numbers in the robot's units.
Paths are relative to the file, and null is a camera without a frame. The default of `id` is the line's number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sinkprune.calibration.evaluation.statistics import mean_warnings
from sinkprune.calibration.tasks import read_jsonl
from sinkprune.contract.budgets import Budget
from sinkprune.contract.errors import ImageError, NumericsError, TaskError
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.precision import Array
from sinkprune.policies.observation import in_trained_order, observed
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.media.images import read_image
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


_FIELDS = "cameras, instruction, state, id (optional)"


@dataclass(frozen=True)
class Moment:
    """A moment of a file, as `Item` is a question of one."""

    id: str
    cameras: tuple[Path | None, ...]
    prompt: str
    """The instruction."""
    state: tuple[float, ...]

    @property
    def picture(self) -> str:
        """The frames' names; moments with the same frames have the same."""
        return " ".join(map(str, self.cameras))

    @property
    def files(self) -> list[Path]:
        """The files of the frames."""
        return [path for path in self.cameras if path is not None]

    def load_images(self) -> list[Image.Image]:
        """Load the frames, RGB."""
        return [read_image(path) for path in self.files]

    def asked_as(self, other: Moment) -> Moment:
        """Return this moment with the instruction of another."""
        return replace(self, prompt=other.prompt)


def load_moments(manifest: Manifest, data: Path, limit: int | None = None) -> list[Moment]:
    """Return the first `limit` moments of a JSONL file, for the policy of `manifest`.

    Every moment and its frames are checked. Raises `TaskError` with the number of the first bad line.
    """
    if data.suffix.lower() != ".jsonl":
        raise TaskError(
            f"--data is '{data}', and the bundle is a robot policy: expected a file of moments that ends in .jsonl, "
            f"one JSON object a line: {_FIELDS}."
        )
    return list(islice(_read(manifest, data), limit))


def _read(manifest: Manifest, data: Path) -> Iterator[Moment]:
    known = set[Path]()

    def read(found: dict[str, Any], number: int) -> Moment:
        moment = _moment(manifest, found, data.parent, number)
        _check(manifest, moment)
        for path in set(moment.files) - known:
            read_image(path)
        known.update(moment.files)
        return moment

    return read_jsonl(data, "moments", _FIELDS, read)


def _moment(manifest: Manifest, found: dict[str, Any], folder: Path, number: int) -> Moment:
    if not {"cameras", "instruction", "state"} <= found.keys() <= {*_FIELDS.removesuffix(" (optional)").split(", ")}:
        raise TaskError(f"found {', '.join(found) or 'no field'}, expected an object with the fields {_FIELDS}.")
    cameras, instruction, state = (found[name] for name in ("cameras", "instruction", "state"))
    if isinstance(cameras, dict):
        cameras = in_trained_order(manifest.acting, cameras)
    if not isinstance(cameras, list) or not all(path is None or isinstance(path, str) for path in cameras):
        raise TaskError(f"'cameras' is {cameras!r}, expected a list of paths, and null for a camera without a frame.")
    if not _numbers(state):
        raise TaskError(f"'state' is {state!r}, expected a list of numbers.")
    if not isinstance(instruction, str):
        raise TaskError(f"'instruction' is {instruction!r}, expected words.")
    paths = tuple(None if path is None else folder / path for path in cameras)
    return Moment(str(found.get("id", number)), paths, instruction, tuple(map(float, state)))


def _numbers(value: Any) -> bool:
    # A JSON number may be an integer that no float holds.
    return isinstance(value, list) and all(type(one) in (int, float) and abs(one) < 1e30 for one in value)


def _check(manifest: Manifest, moment: Moment) -> None:
    """Check a moment as `Policy.act` does; raises `ImageError`, `PromptError` and `UsageError`."""
    missing = [path for path in moment.files if not path.is_file()]
    if missing:
        raise ImageError(f"'{missing[0]}' is no file, expected a frame. Paths are relative to the file of moments.")
    observed(manifest, moment.cameras, moment.prompt, moment.state)


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
