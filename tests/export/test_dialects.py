"""Both dialects compute the same: operation by operation against numpy, graph by graph and answer by answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.bundle import Bundle, read_bundle
from sinkprune.contract.manifest import GraphSpec, TensorSpec
from sinkprune.export.dialects import DIALECTS, load_dialect
from sinkprune.export.graph import Graph
from sinkprune.export.weights import PRECISIONS
from sinkprune.runtime.backends import load_backend
from sinkprune.runtime.backends.kv_cache import cache_names
from sinkprune.runtime.backends.models import Model
from support.models.graphs import Array, Run, loaded
from support.programs.slow_cases import slow_except

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
Bundles = Callable[..., Path]
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
@both_dialects
def test_rotary_turns_the_halves(dialect: str, precision: str) -> None:
    x, angle = normal(1, 1, 3, 5, 8, precision=precision), normal(2, 1, 5, 4)
    cos, sin = (table(angle).astype(x.dtype) for table in (np.cos, np.sin))
    first, second = np.split(x.astype(np.float64), 2, axis=-1)
    expected = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    found = operation(dialect, precision, lambda d, op, v: d.rotary(op, *v), x, cos, sin)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE[precision])


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


def given(spec: GraphSpec, sizes: dict[str, int]) -> dict[str, Array]:
    """Inputs for a graph: normal numbers, and for the indices rows of an image, or of two, followed by text."""
    start = 4
    indices = {
        "visual_index": np.arange(start, start + sizes["V"]),
        "text_index": np.arange(start + sizes["V"], sizes["S"]),
        "visual_group": np.arange(sizes["V"]) * 2 // max(sizes["V"], 1),
        "quota": np.arange(20) // 10,
    }

    def array(tensor: TensorSpec, seed: int) -> Array:
        shape = [dim if isinstance(dim, int) else sizes[dim] for dim in tensor.shape]
        return normal(seed, *shape).astype(tensor.dtype)

    return {
        tensor.name: indices[tensor.name] if tensor.name in indices else array(tensor, seed)
        for seed, tensor in enumerate(spec.inputs)
        if not tensor.name.startswith("past_")
    }


def sizes_of(new: int) -> dict[str, int]:
    return {"G": 2, "N": 40, "n": 7, "S": new, "V": max(new - 10, 0), "V2": 20, "L": 6}


PREFILL, CONTINUED, DECODE = sizes_of(60), sizes_of(30), sizes_of(1)


def seen(spec: GraphSpec, root: Path, photo: Image.Image) -> dict[str, Array]:
    """What `vision` is given of a photo."""
    arrays = Pipeline.load(root, check_sums=False).family.inputs(photo)
    return {tensor.name: arrays[tensor.name].astype(tensor.dtype) for tensor in spec.inputs}


def pairs(bundle: Bundles, kind: str, precision: str) -> Iterator[tuple[str, GraphSpec, list[Run]]]:
    """Every graph of a small bundle, in both dialects; a decoder keeps its caches from call to call."""
    name, budgets, images = KINDS[kind]
    bundles = [read_bundle(bundle(name, precision, budgets, dialect, images)) for dialect in DIALECTS]
    backend = load_backend("ort-cpu", threads=1)

    def engine(one: Bundle, graph: str) -> Run:
        model = Model.of_bundle(one, graph)
        if graph.startswith("decoder_"):
            decoder = backend.load_decoder(model, one.manifest.cache, lambda engine: engine)
            call = partial(decoder, cache=decoder.new_cache())
        else:
            call = backend.load(model)

        def run_engine(**inputs: Array) -> dict[str, Array]:
            outputs = call({name: backend.tensor(array) for name, array in inputs.items()})
            return {name: backend.numpy(tensor) for name, tensor in outputs.items()}

        return run_engine

    for name, spec in bundles[0].manifest.graphs.items():
        other = bundles[1].manifest.graphs[name]
        assert other == spec or (name.startswith("decoder_") and other.inputs == spec.inputs)
        yield name, spec, [engine(one, name) for one in bundles]


@pytest.mark.parametrize(
    ("kind", "precision"),
    # The others are made of the same operators.
    slow_except({("llava", "fp16")}, product(KINDS, PRECISIONS)),
)
def test_every_graph_computes_the_same_in_both_dialects(
    kind: str, precision: str, bundle: Bundles, photo: Image.Image
) -> None:
    compared, (checkpoint, budgets, images) = 0, KINDS[kind]
    root = bundle(checkpoint, precision, budgets, "opset24", images)
    for name, spec, engines in pairs(bundle, kind, precision):
        for sizes in (PREFILL, CONTINUED, DECODE) if name.startswith(("decoder", "head")) else (PREFILL,):
            inputs = seen(spec, root, photo) if name == "vision" else given(spec, sizes)
            native, lowered = (engine(**inputs) for engine in engines)
            assert native.keys() == lowered.keys()
            caches = cache_names(spec)
            for output, wanted in native.items():
                if output in caches:
                    # One gives all rows of the cache, the other the new ones.
                    filled = {PREFILL["S"]: 60, CONTINUED["S"]: 90, DECODE["S"]: 91}[sizes["S"]]
                    wanted = wanted[:, :, filled - sizes["S"] : filled]
                found, where = lowered[output], f"{name}: {output} of {sizes}"
                assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), where
                if wanted.dtype == np.int64:
                    np.testing.assert_array_equal(found, wanted, where)
                else:
                    # Roundings add up from layer to layer; each has two caches.
                    deep = max(1, len(caches) // 8)
                    atol = deep * TOLERANCE[precision] * max(1.0, float(np.abs(wanted).max()))
                    np.testing.assert_allclose(found, wanted, rtol=0, atol=atol, err_msg=where)
                    compared += 1
    assert compared > 50


@pytest.mark.parametrize("kind", slow_except({"llava, several images", "qwen3-vl"}, KINDS))
def test_the_answers_are_the_same(kind: str, bundle: Bundles, photo: Image.Image) -> None:
    name, budgets, images = KINDS[kind]
    pipelines = [Pipeline.load(bundle(name, "fp32", budgets, dialect, images)) for dialect in DIALECTS]
    for budget in ("none", *budgets):
        answers = [
            pipeline.generate(
                [photo] * images, "Which colour is the cup?", budget=budget, max_new_tokens=12, min_new_tokens=12
            )
            for pipeline in pipelines
        ]
        assert answers[0].token_ids == answers[1].token_ids
        assert answers[0].text == answers[1].text
        assert answers[0].tokens_per_layer == answers[1].tokens_per_layer
        assert answers[0].kept.index.tolist() == answers[1].kept.index.tolist()
