"""Attention to a cache, in both dialects, against numpy with a cache that grows."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkprune.export.dialects import DIALECTS, LayerCache, load_dialect
from sinkprune.export.graph import Graph
from sinkprune.export.weights import PRECISIONS
from support.models.graphs import Run, loaded

Array = np.ndarray[Any, Any]
TOLERANCE = {"fp32": 1e-5, "fp16": 2e-2}
HEADS = {"mha": (4, 4), "gqa": (6, 2), "mqa": (3, 1)}
SIZE = 8


def layers(dialect: str, precision: str, heads: str, *, causal: bool) -> Run:
    """Attention of two layers that share a mask; both have the same new rows, and caches of their own."""
    graph = Graph("attention", PRECISIONS[precision], load_dialect(dialect))  # type: ignore[arg-type]
    count, kv_count = HEADS[heads]
    new = (
        graph.input("query", [1, count, "S", SIZE]),
        *(graph.input(name, [1, kv_count, "S", SIZE]) for name in ("key", "value")),
    )
    length, mask = graph.input("past_length", [1], ir.DataType.INT64), None
    for layer in range(2):
        room = [1, kv_count, "C", SIZE]
        past = LayerCache(graph.input(f"past_key_{layer}", room), graph.input(f"past_value_{layer}", room), length)
        attended = graph.dialect.cached_attention(graph.op, *new, past, mask, causal=causal)
        mask = attended.mask
        graph.output(f"mixed_{layer}", attended.mixed, [1, count, "S", SIZE])
        for name, value in (("key", attended.key), ("value", attended.value)):
            rows = "C" if graph.dialect.CACHE == "in-place" else "S"
            # Of rows alone both layers give the same tensor, which can be an output once.
            graph.output(f"{name}_{layer}", graph.op.Identity(value), [1, kv_count, rows, SIZE])
    return loaded(graph)


def expected(query: Array, key: Array, value: Array, *, causal: bool) -> Array:
    """Of the last rows, those of `query`, to all rows of the grown caches `key` and `value`, in fp64."""
    group = query.shape[1] // key.shape[1]
    query, key, value = (x.astype(np.float64) for x in (query, key, value))
    key, value = (np.repeat(x, group, axis=1) for x in (key, value))
    new, rows = query.shape[2], key.shape[2]
    seen = np.arange(rows) <= rows - new + (np.arange(new)[:, None] if causal else np.full((new, 1), new))
    scores = np.where(seen, query @ key.swapaxes(2, 3) / np.sqrt(SIZE), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ value


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_it_is_that_of_a_cache_that_grows(dialect: str, precision: str, heads: str, causal: bool) -> None:
    run, in_place = layers(dialect, precision, heads, causal=causal), load_dialect(dialect).CACHE == "in-place"  # type: ignore[arg-type]
    count, kv_count = HEADS[heads]
    dtype = PRECISIONS[precision].numpy

    @settings(max_examples=30, deadline=None, derandomize=True, database=None)
    @given(st.integers(0, 9), st.integers(1, 7), st.integers(0, 5), st.sampled_from([0.0, 30.0]))
    def holds(past: int, new: int, spare: int, left_behind: float) -> None:
        """Behind the rows that are filled lies `left_behind`, or its negative."""
        rng = np.random.default_rng(past + 10 * new)

        def normal(heads: int, rows: int) -> Array:
            return rng.standard_normal((1, heads, rows, SIZE)).astype(dtype)

        query, key, value = 8 * normal(count, new), normal(kv_count, new), normal(kv_count, new)
        filled = {f"{name}_{layer}": normal(kv_count, past) for name in ("key", "value") for layer in range(2)}
        room = past + spare + (new if in_place else 0)
        buffers = {name: np.full((1, kv_count, room, SIZE), left_behind, dtype) for name in filled}
        for name, buffer in buffers.items():
            buffer[..., ::2] *= -1
            buffer[:, :, :past] = filled[name]
        inputs = {f"past_{name}": buffer for name, buffer in buffers.items()}
        given = run(query=query, key=key, value=value, past_length=np.array([past]), **inputs)
        for layer in range(2):
            grown = [
                np.concatenate([filled[f"{name}_{layer}"], rows], axis=2)
                for name, rows in (("key", key), ("value", value))
            ]
            mixed = expected(query, *grown, causal=causal)
            np.testing.assert_allclose(given[f"mixed_{layer}"], mixed, atol=TOLERANCE[precision])
            for name, rows in zip(("key", "value"), grown, strict=True):
                behind = buffers[f"{name}_{layer}"][:, :, past + new :]
                wanted = np.concatenate([rows, behind], axis=2) if in_place else rows[:, :, past:]
                np.testing.assert_array_equal(given[f"{name}_{layer}"], wanted)

    holds()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_no_product_is_larger_than_scores_and_no_head_is_repeated(dialect: str) -> None:
    """What a token costs is reading the cache: nothing that is computed has its size."""
    graph = Graph("attention", PRECISIONS["fp32"], load_dialect(dialect))  # type: ignore[arg-type]
    new = [graph.input(name, [1, heads, "S", SIZE]) for name, heads in (("query", 6), ("key", 2), ("value", 2))]
    length = graph.input("past_length", [1], ir.DataType.INT64)
    past = LayerCache(*(graph.input(f"past_{name}", [1, 2, "C", SIZE]) for name in ("key", "value")), length)
    graph.dialect.cached_attention(graph.op, *new, past, None, causal=True)
    operators = [node.op_type for node in graph.op.builder.graph]
    assert not {"Tile", "ScatterND", "ScatterElements"} & set(operators)
    of_caches = [node for node in graph.op.builder.graph if {past.key, past.value} & set(node.inputs)]
    expected = {"TensorScatter"} if graph.dialect.CACHE == "in-place" else {"Transpose", "MatMul", "Shape"}
    assert {node.op_type for node in of_caches} == expected
