"""Rows of several tensors in a new order."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sinkprune.runtime.backends import load_backend
from sinkprune.runtime.backends.kv_cache import row_runs


@st.composite
def parts_and_order(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any))
    pieces = draw(st.lists(st.tuples(st.integers(0, sum(lengths) - 1), st.integers(0, 6)), max_size=6))
    order = [row for start, count in pieces for row in range(start, min(start + count, sum(lengths)))]
    return lengths, order


@given(parts_and_order())
def test_runs_put_every_row_where_it_belongs(case: tuple[list[int], list[int]]) -> None:
    lengths, order = case
    parts = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    found = np.full(len(order), -1)
    runs = row_runs(lengths, np.array(order, np.int64))
    for part, first, length, place in runs:
        assert length > 0
        assert first + length <= lengths[part]
        assert (found[place : place + length] == -1).all()
        found[place : place + length] = parts[part][first : first + length]
    assert found.tolist() == order


def test_what_stands_together_is_one_run() -> None:
    # Text, a picture, text behind it
    order = np.array([0, 1, 2, 5, 6, 7, 8, 3, 4])
    assert [*row_runs([5, 4], order)] == [(0, 0, 3, 0), (1, 0, 4, 3), (0, 3, 2, 7)]


def test_a_backend_joins_groups_of_rows() -> None:
    backend = load_backend("ort-cpu")
    text = np.arange(6, dtype=np.float32).reshape(3, 2)
    picture = 100 + np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    order = np.array([0, 3, 4, 2, 5, 6, 1])
    joined = backend.numpy(backend.join([backend.tensor(text), backend.tensor(picture)], order))
    np.testing.assert_array_equal(joined, np.concatenate([text, picture.reshape(4, 2)])[order][None])
