"""The tokens of each frame that go to the LLM, chosen without later frames."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sinkprune.contract.budgets import Counts
from sinkprune.contract.plans import Plan
from sinkprune.contract.precision import Array
from sinkprune.runtime.backends import Tensor
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.steps.chain import Chain
from sinkprune.runtime.steps.encoding import EncodedPicture, TowerOutput, encode, encode_tokens

_NEW_SCENE = 0.5
"""A frame is a key frame if more than this share of its tokens is new."""


class FrameTokens(NamedTuple):
    """The tokens of a frame that go to the LLM."""

    key: bool
    """Whether the budget's sanitizer chose them from the whole frame; otherwise they are what is new in it."""
    encoded: EncodedPicture | None
    """Their n rows, as one group; None for no rows."""
    sinks: Array
    """[n] bool: whether a row is the mean of a group's outliers."""
    features: Array
    """[T,D] fp32: the vision tower's output for all T tokens of the frame, with length 1."""


class FrameSanitizer:
    """Chooses the tokens of one frame after the other.

    In a key frame, the budget's sanitizer chooses, as for a picture. The first frame is one, then every
    `key_every`-th, and a frame of which more than half is new. In every other frame, `new_tokens` chooses.
    """

    def __init__(self, chain: Chain, plan: Plan, key_every: int, novelty: float) -> None:
        """Choose by the sanitizer of `plan`. A token is new if its novelty is more than `novelty`."""
        self._chain, self._plan = chain, plan
        self._key_every, self._novelty = key_every, novelty
        self._known: Array | None = None
        self._since_key = 0

    def __call__(
        self, tower: TowerOutput, counts: Counts, groups: int, clock: Stopwatch, question: Tensor | None = None
    ) -> FrameTokens:
        """Return the tokens of the next frame; the sanitizer keeps `counts` of each of `groups` groups.

        `question` is that of `encode`.
        """
        with clock.measure("sanitizer"):
            features, known = unit_rows(self._chain.backend.numpy(tower.tokens)), self._known
            novelty = None if known is None else 1 - np.sum(features * known, axis=1)
        self._since_key += 1
        if (
            known is None
            or novelty is None
            or self._since_key >= self._key_every
            or (novelty > self._novelty).mean() > _NEW_SCENE
        ):
            self._known, self._since_key = features.copy(), 0
            encoded = as_one_group(encode(self._chain, self._plan, tower, clock, question))
            return FrameTokens(True, encoded, np.tile(np.arange(counts.kept) < counts.sink, groups), features)
        chosen = new_tokens(novelty, tower.norms.reshape(groups, -1), counts, self._novelty)
        known[chosen] = features[chosen]
        added = as_one_group(encode_tokens(self._chain, tower, chosen, clock)) if len(chosen) else None
        return FrameTokens(False, added, np.zeros(len(chosen), bool), features)


def new_tokens(novelty: Array, norms: Array, counts: Counts, least: float) -> Array:
    """Return a frame's tokens of largest `novelty` [G*N], at most as many as `counts`, ascending.

    The novelty of a token is 1 - cos to the feature that its place in the frame had when a row of it was last kept,
    or at the last key frame. It must be more than `least`. The tokens of each group with the largest `norms` [G,N],
    its outliers, are no candidates. Ties go to the lower token.
    """
    by_norm = np.argsort(-norms, axis=1, kind="stable")
    outliers = np.zeros(norms.shape, bool)
    np.put_along_axis(outliers, by_norm[:, : counts.outliers], True, axis=1)
    candidates = np.flatnonzero((novelty > least) & ~outliers.ravel())
    ranked = candidates[np.argsort(-novelty[candidates], kind="stable")]
    return np.sort(ranked[: counts.kept * len(norms)])


def as_one_group(encoded: EncodedPicture) -> EncodedPicture:
    """Return the rows of all groups as those of one group, with tokens numbered through all groups."""
    return EncodedPicture(
        encoded.embeddings,
        encoded.source_tokens[None],
        encoded.norms.reshape(1, -1),
        encoded.salience.reshape(1, -1),
        encoded.deepstack,
    )


def unit_rows(tokens: Array) -> Array:
    """Return `tokens` [G,N,D] as [G*N,D] fp32 rows of length 1; zeros stay zeros, whose cosine is 0."""
    rows = tokens.astype(np.float32).reshape(-1, tokens.shape[-1])
    # By the largest value first, because squares of large values exceed fp32.
    largest = np.abs(rows).max(axis=1, keepdims=True)
    rows /= np.where(largest > 0, largest, 1)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float32).tiny)
