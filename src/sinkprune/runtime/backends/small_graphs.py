"""Graphs without weights that backends on CUDA run besides a bundle's, so that the host reads little and late.

On CPUs the same is done in numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sinkprune.contract.manifest import Dtype, Manifest
from sinkprune.contract.precision import DTYPES
from sinkprune.runtime.backends.onnx_writer import ELEMENT_TYPES, GraphWriter

BEST, NOT_FINITE, AT_TOKENS = "best", "not-finite", "at-tokens"
"""The names of the graphs, and of their engines."""


def best_graph(dtype: Dtype, vocabulary: int) -> GraphWriter:
    """Return a graph: best [1,2] fp32 of logits [1,vocabulary] of `dtype`.

    The first number is the index of the largest logit, the lowest of equal ones: `ArgMax` leaves ties to the library.
    The second is how many logits are not finite. fp32 holds every index below 2**24.
    """
    graph = GraphWriter()
    scores = graph.op("Cast", graph.input("logits", dtype, (1, vocabulary)), to=ELEMENT_TYPES["float32"])
    is_largest = graph.op("Equal", scores, graph.op("ReduceMax", scores, axes=[1]))
    place = graph.constant(np.arange(vocabulary, dtype=np.float32)[None])
    candidate = graph.op("Where", is_largest, place, graph.constant(np.array([[vocabulary]], np.float32)))
    index = graph.op("ReduceMin", candidate, axes=[1])
    graph.op("Concat", index, _not_finite(graph, scores, axis=1), into="best", axis=1)
    graph.output("best", "float32", (1, 2))
    return graph


def not_finite_graph(dtype: Dtype) -> GraphWriter:
    """Return a graph: count [1] fp32, how many of values [E] of `dtype` are not finite."""
    graph = GraphWriter()
    values = graph.op("Cast", graph.input("values", dtype, ("E",)), to=ELEMENT_TYPES["float32"])
    graph.op("Identity", _not_finite(graph, values, axis=0), into="count")
    graph.output("count", "float32", (1,))
    return graph


def at_tokens_graph(dtype: Dtype, width: int) -> GraphWriter:
    """Return a graph: the rows of two tables [P,width] at the tokens kept [G,n] + first [G,1], each [G,n,width]."""
    graph = GraphWriter()
    tables = [graph.input(name, dtype, ("P", width)) for name in ("cos", "sin")]
    kept, first = graph.input("kept", "int64", ("G", "n")), graph.input("first", "int64", ("G", 1))
    tokens = graph.op("Add", kept, first)
    for table in tables:
        graph.op("Gather", table, tokens, into=f"{table}_out", axis=0)
        graph.output(f"{table}_out", dtype, ("G", "n", width))
    return graph


WRITERS: Mapping[str, Callable[..., GraphWriter]] = {
    BEST: best_graph,
    NOT_FINITE: not_finite_graph,
    AT_TOKENS: at_tokens_graph,
}
"""The writers of the graphs, by name."""


def _not_finite(graph: GraphWriter, values: str, axis: int) -> str:
    # Comparisons with what is no number are false. A library may take x - x for 0.
    largest = graph.constant(np.array(np.finfo(np.float32).max))
    is_finite = graph.op("LessOrEqual", graph.op("Abs", values), largest)
    return graph.op(
        "ReduceSum",
        graph.op("Cast", graph.op("Not", is_finite), to=ELEMENT_TYPES["float32"]),
        graph.constant(np.array([axis])),
    )


def graphs_of(manifest: Manifest) -> dict[str, GraphWriter]:
    """Return the graphs that a bundle needs, by their names."""
    lm, precision = manifest.language_model, DTYPES[manifest.precision].name
    kinds: dict[str, tuple[Any, ...]] = {}
    if manifest.policy is None:
        kinds[BEST] = (precision, lm.vocab_size)
    if manifest.projector is None:
        kinds[NOT_FINITE] = (precision,)
    if lm.rope_sections:
        kinds[AT_TOKENS] = (precision, lm.head_dim // 2)
    return {name: WRITERS[name](*kind) for name, kind in kinds.items()}
