"""Both dialects compute the same: operation by operation against numpy, and answer by answer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.export.dialects import DIALECTS, load_dialect
from sinkprune.export.graph import Graph
from sinkprune.export.weights import PRECISIONS
from support.models.graphs import Array, loaded
from support.programs.slow_cases import slow_except
from support.references.steps import ask

TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2}
BUDGETS = ("retain-64", "retain-32+raster+visual-keys+compact")
# Checkpoint, budgets, and how many images a prompt may have
KINDS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "llava": ("gqa-112", BUDGETS, 1),
    "llava, several images": ("gqa-112", ("retain-64+visual-keys",), 2),
    "llava-next": ("next-mistral", ("retain-320", "retain-160+raster+visual-keys+compact"), 1),
    "internvl": ("internvl3.5", ("prune-66.7", "prune-88.9+raster+visual-keys+compact"), 1),
    "qwen2.5-vl": ("qwen", ("prune-66.7", "prune-88.9+raster+visual-keys"), 1),
    "qwen2-vl, several images": ("qwen2-vl", ("prune-80",), 2),
    "qwen3-vl": ("qwen3-vl", ("prune-80",), 1),
}
Emit = Callable[[Any, Any, list[ir.Value]], ir.Value]


def operation(dialect: str, precision: str, emit: Emit, *inputs: Array) -> Array:
    """What an operation of a dialect computes; inputs of float type are of the graph's precision."""
    graph = Graph("operation", PRECISIONS[precision], load_dialect(dialect))  # type: ignore[arg-type]
    types = [ir.DataType.from_numpy(array.dtype) for array in inputs]
    values = [graph.input(f"x{place}", array.shape, types[place]) for place, array in enumerate(inputs)]
    result = emit(graph.dialect, graph.op, values)
    graph.output("y", result, [f"d{axis}" for axis in range(len(result.shape))], result.dtype)
    return loaded(graph)(**{f"x{place}": array for place, array in enumerate(inputs)})["y"]


def normal(seed: int, *shape: int, precision: str = "fp32", scale: float = 1.0) -> Array:
    array = np.random.default_rng(seed).standard_normal(shape) * scale
    return array.astype(PRECISIONS[precision].numpy)


def softmax(x: Array) -> Array:
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


both_dialects = pytest.mark.parametrize("dialect", DIALECTS)
both_precisions = pytest.mark.parametrize("precision", PRECISIONS)


@both_precisions
@both_dialects
def test_the_norm_is_computed_in_fp32(dialect: str, precision: str) -> None:
    # Squares of these pass fp16's maximum, and the mean of squares of the small ones its smallest number.
    x = normal(1, 1, 3, 64, precision=precision) * np.array([[[1000.0], [1.0], [1e-4]]], PRECISIONS[precision].numpy)
    weight = normal(2, 64, precision=precision)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-9) * weight
    found = operation(dialect, precision, lambda d, op, v: d.rms_norm(op, v[0], v[1], 1e-9), x, weight)
    assert found.dtype == x.dtype
    np.testing.assert_allclose(found, expected, rtol=3e-3, atol=TOLERANCE[precision])


@both_precisions
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@both_dialects
def test_attention_sees_what_the_mask_shows(dialect: str, heads: int, kv_heads: int, precision: str) -> None:
    # Scores of up to some 60: the mask must be far below, and its sum with them finite.
    query = normal(1, 1, heads, 5, 8, precision=precision, scale=8.0)
    key, value = (normal(seed, 1, kv_heads, 9, 8, precision=precision) for seed in (2, 3))
    # A row that sees one key, one that sees all, and no order among the others.
    mask = np.random.default_rng(4).random((5, 9)) < 0.4
    mask[0], mask[1], mask[:, 3] = False, True, True
    wide = [np.repeat(x.astype(np.float64), heads // x.shape[1], axis=1) for x in (query, key, value)]
    scores = wide[0] @ wide[1].swapaxes(2, 3) / np.sqrt(8)
    seen = operation(dialect, precision, lambda d, op, v: d.attention(op, *v), query, key, value, mask)
    np.testing.assert_allclose(seen, softmax(np.where(mask, scores, -np.inf)) @ wide[2], atol=TOLERANCE[precision])
    every = operation(dialect, precision, lambda d, op, v: d.attention(op, *v), query, key, value)
    np.testing.assert_allclose(every, softmax(scores) @ wide[2], atol=TOLERANCE[precision])


@both_dialects
@pytest.mark.parametrize("size", [1, 2, 127, 128, 129, 700])
def test_the_running_sum_is_exact(dialect: str, size: int) -> None:
    x = np.random.default_rng(size).integers(0, 2, size)
    found = operation(dialect, "fp32", lambda d, op, v: d.running_sum(op, v[0]), x)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, np.cumsum(x))


@pytest.mark.parametrize(
    ("kind", "precision"),
    # The others are made of the same operators.
    slow_except(
        {("llava", "fp16"), ("llava, several images", "fp32"), ("qwen3-vl", "fp32")}, product(KINDS, PRECISIONS)
    ),
)
def test_the_answers_are_the_same(kind: str, precision: str, bundle: Callable[..., Path], photo: Image.Image) -> None:
    name, budgets, images = KINDS[kind]
    pipelines = [Pipeline.load(bundle(name, precision, budgets, dialect, images)) for dialect in DIALECTS]
    # fp16 rounds, and another choice of tokens is another answer.
    exact = precision == "fp32"
    for budget in ("none", *budgets) if exact else ("none",):
        (native, wanted), (lowered, logits) = (ask(one, [photo] * images, budget, 12) for one in pipelines)
        compared = slice(12 if exact else 1)
        np.testing.assert_allclose(logits[compared], wanted[compared], atol=TOLERANCE[precision] * abs(wanted).max())
        if exact:
            assert lowered.token_ids == native.token_ids
            assert lowered.tokens_per_layer == native.tokens_per_layer
            assert lowered.kept.index.tolist() == native.kept.index.tolist()
