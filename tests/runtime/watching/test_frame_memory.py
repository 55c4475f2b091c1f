"""Which rows of frames are chosen and remembered, against slow and obvious versions."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinkprune.contract.budgets import Counts
from sinkprune.runtime.backends.row_runs import joined
from sinkprune.runtime.steps.encoding import EncodedPicture
from sinkprune.runtime.watching.frame_memory import FrameMemory
from sinkprune.runtime.watching.frame_sanitizer import FrameTokens, new_tokens, unit_rows

Array = np.ndarray[Any, Any]
HOST: Any = SimpleNamespace(join=joined)
LEAST = 0.25


@given(
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(0, 3),
    st.integers(1, 5),
    st.data(),
)
def test_new_tokens(groups: int, tokens: int, outliers: int, kept: int, data: st.DataObject) -> None:
    some = st.sampled_from([0.0, 0.25, 0.3, 1.0, 2.0])
    novelty = np.array(data.draw(st.lists(some, min_size=groups * tokens, max_size=groups * tokens)))
    norms = np.array(data.draw(st.lists(some, min_size=groups * tokens, max_size=groups * tokens)))
    outliers = min(outliers, tokens)
    counts = Counts(outliers=outliers, sink=0, reserve=kept, diverse=0, stages=())

    left = []
    for group in range(groups):
        own = [*range(group * tokens, (group + 1) * tokens)]
        for _ in range(outliers):
            own.remove(max(own, key=lambda token: (norms[token], -token)))
        left += own
    left = sorted((token for token in left if novelty[token] > LEAST), key=lambda token: (-novelty[token], token))
    expected = sorted(left[: kept * groups])
    assert new_tokens(novelty, norms.reshape(groups, tokens), counts, LEAST).tolist() == expected


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_unit_rows_of_any_scale(scale: float) -> None:
    tokens = np.array([[[3, 4], [0, 0], [-1, 0]]], np.float32) * np.float32(scale)
    np.testing.assert_allclose(unit_rows(tokens), [[0.6, 0.8], [0, 0], [-1, 0]], rtol=1e-6)


@dataclass
class Row:
    """A remembered row of the slow version."""

    frame: int
    token: int
    feature: Array
    sink: bool
    score: float = 0.0


_FRAME = st.tuples(st.booleans(), st.lists(st.integers(0, 3), unique=True, max_size=4), st.integers(0, 3))


@given(
    st.lists(_FRAME, min_size=1, max_size=8),
    st.one_of(st.none(), st.integers(9, 14)),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(1, 2),
    st.data(),
)
def test_memory(
    frames: list[tuple[bool, list[int], int]], capacity: int | None, decay: float, recent: int, data: st.DataObject
) -> None:
    """Frames of four tokens and two features: key or not, with these tokens, and features by a seed.

    A watch rejects a capacity below two recent frames and a sink.
    """
    memory, rows = FrameMemory(HOST, capacity, decay, recent), list[Row]()
    for number, (key, chosen, seed) in enumerate(frames):
        tokens, key = sorted(chosen) or [0], key or number == 0
        features = np.eye(2, dtype=np.float32)[[(token * seed) % 2 for token in range(4)]]
        sinks = np.array([key and place == 0 for place in range(len(tokens))])
        # A row's embedding is its frame and token, so that rows cannot be mixed up.
        embeddings = np.array([[[number, token] for token in tokens]], np.float32)
        norms = np.zeros((1, 4), np.float32)
        encoded = EncodedPicture(embeddings, np.array([tokens]), norms, norms)
        memory.add(number, FrameTokens(key, encoded, sinks, features), LEAST)

        if key:
            rows = [row for row in rows if not row.sink and 1 - row.feature @ features[row.token] > LEAST]
        rows += [Row(number, token, features[token], bool(sink)) for token, sink in zip(tokens, sinks, strict=True)]
        assert memory.tokens.tolist() == [[row.frame, row.token] for row in rows]

        attention = np.array(
            data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=len(rows), max_size=len(rows)))
        )
        memory.score(attention)
        for row, received in zip(rows, attention, strict=True):
            row.score = decay * row.score + received

        evicted = 0
        while capacity is not None and len(rows) > capacity:
            free = [row for row in rows if not row.sink and row.frame <= number - recent]
            rows.remove(min(free, key=lambda row: row.score))
            evicted += 1
        assert memory.evict(number) == evicted
        assert memory.rows == len(rows)
        assert memory.tokens.tolist() == [[row.frame, row.token] for row in rows]
        held = np.concatenate([frame.encoded.embeddings[0] for frame in memory.frames])
        assert held.tolist() == [[row.frame, row.token] for row in rows]
        assert [float(score) for frame in memory.frames for score in frame.scores] == [row.score for row in rows]
