"""The rows of earlier frames that a watch keeps, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sinkprune.contract.precision import Array
from sinkprune.runtime.backends import Backend
from sinkprune.runtime.steps.encoding import EncodedPicture
from sinkprune.runtime.watching.frame_sanitizer import FrameTokens


@dataclass(frozen=True)
class RememberedFrame:
    """The n rows that are left of a frame."""

    number: int
    """The number of the frame in the stream."""
    encoded: EncodedPicture
    """The rows, as one group."""
    features: Array
    """[n,D] fp32: the vision tower's output for each row's token, with length 1."""
    sinks: Array
    """[n] bool: whether a row is the mean of a group's outliers."""
    scores: Array
    """[n] float64: the decayed sum of the attention that each row received from the instruction."""

    @property
    def tokens(self) -> Array:
        """[n] int64: the token of each row, numbered through all groups of the frame."""
        return self.encoded.kept_index[0]

    def only(self, backend: Backend, left: Array) -> RememberedFrame:
        """Return the frame with the rows `left` [n] bool, of which there is at least one."""
        rows, encoded = np.flatnonzero(left), self.encoded
        if len(rows) == len(left):
            return self
        deepstack = None if encoded.deepstack is None else backend.join([encoded.deepstack], rows)
        fewer = replace(
            encoded,
            embeddings=backend.join([encoded.embeddings], rows),
            kept_index=encoded.kept_index[:, rows],
            deepstack=deepstack,
        )
        return RememberedFrame(self.number, fewer, self.features[rows], self.sinks[rows], self.scores[rows])


class FrameMemory:
    """The rows of a stream's frames that later frames are answered with.

    After each frame, rows are dropped until at most `capacity` are left: those with the lowest decayed score first,
    and the earlier one of two equal scores. The newest `recent` frames, and the sinks of the last key frame, stay.
    """

    def __init__(self, backend: Backend, capacity: int | None, decay: float, recent: int) -> None:
        """Start empty. Scores are multiplied by `decay` with each frame; a `capacity` of None drops no rows."""
        self._backend, self._capacity, self._decay, self._recent = backend, capacity, decay, recent
        self.frames: list[RememberedFrame] = []
        """The frames with rows left, oldest first."""

    @property
    def rows(self) -> int:
        """The number of rows of all frames."""
        return sum(len(frame.tokens) for frame in self.frames)

    @property
    def tokens(self) -> Array:
        """[V,2] int64: the frame and the token of each row, in order."""
        parts = [np.stack([np.full(len(frame.tokens), frame.number), frame.tokens], axis=1) for frame in self.frames]
        return np.concatenate([np.zeros((0, 2), np.int64), *parts])

    def add(self, number: int, found: FrameTokens, novelty: float) -> None:
        """Add the rows of frame `number`.

        A key frame replaces the sinks of earlier frames, and the rows whose place in the frame still looks the same:
        whose novelty is at most `novelty`.
        """
        if found.key:
            self._keep_only(
                [
                    ~frame.sinks & (1 - np.sum(frame.features * found.features[frame.tokens], axis=1) > novelty)
                    for frame in self.frames
                ]
            )
        if found.encoded is not None:
            tokens = found.encoded.kept_index[0]
            scores = np.zeros(len(tokens))
            self.frames.append(RememberedFrame(number, found.encoded, found.features[tokens], found.sinks, scores))

    def score(self, attention: Array) -> None:
        """Decay all scores, and add the `attention` [V] that each row received for the newest frame."""
        ends = np.cumsum([len(frame.tokens) for frame in self.frames])[:-1]
        self.frames = [
            replace(frame, scores=self._decay * frame.scores + own)
            for frame, own in zip(self.frames, np.split(attention, ends), strict=True)
        ]

    def evict(self, newest: int) -> int:
        """Drop rows until at most the capacity is left, and return how many; `newest` is the last frame's number."""
        excess = 0 if self._capacity is None else max(0, self.rows - self._capacity)
        if excess:
            stays = [frame.sinks | (frame.number > newest - self._recent) for frame in self.frames]
            left = surviving(np.concatenate([one.scores for one in self.frames]), np.concatenate(stays), excess)
            self._keep_only(np.split(left, np.cumsum([len(own) for own in stays])[:-1]))
        return excess

    def _keep_only(self, left: Sequence[Array]) -> None:
        """Keep the rows `left` [n] bool of each frame, and forget frames without rows."""
        pairs = zip(self.frames, left, strict=True)
        self.frames = [frame.only(self._backend, own) for frame, own in pairs if own.any()]


def surviving(scores: Array, stays: Array, excess: int) -> Array:
    """Return [V] bool: all rows but the `excess` of lowest score. Rows of `stays` [V] bool are dropped last."""
    left = np.ones(len(scores), bool)
    left[np.argsort(np.where(stays, np.inf, scores), kind="stable")[:excess]] = False
    return left
