"""Plan graphs as the exporter writes them, each built and loaded once, run on arrays."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner

from sinkprune.budgets import Budget
from sinkprune.bundle import LanguageModel
from sinkprune.export.graph import Graph
from sinkprune.export.methods import PlanFacts, load_method
from sinkprune.export.precision import PRECISIONS
from sinkprune.runtime.backends import load_backend

Array = np.ndarray[Any, Any]
Run = Callable[..., dict[str, Array]]
"""A graph as a function from its inputs, by name, to its outputs."""


def language_model(num_heads: int = 4, num_kv_heads: int = 4, head_dim: int = 8) -> LanguageModel:
    """Facts of a small decoder of four layers, the first cut after layer 0."""
    d = num_heads * head_dim
    return LanguageModel(d, 2 * d, 4, num_heads, num_kv_heads, head_dim, 100, 4096, 10000.0)


def sanitizer_graph(n: int, d: int, budget: Budget, precision: str = "fp32") -> Graph:
    """`sanitizer` of `budget` for groups of `n` tokens of width `d`."""
    graph: Graph = _plan(PlanFacts(language_model(), n, d, PRECISIONS[precision]), budget).sanitizer
    return graph


def select_graph(model: LanguageModel, budget: Budget, tokens: int, precision: str = "fp32") -> Graph:
    """The first `select_after_*` of `budget` for an image of `tokens` visual tokens."""
    graph: Graph = _plan(PlanFacts(model, tokens, model.hidden_size, PRECISIONS[precision]), budget).select_after[0]
    return graph


@cache
def sanitizer(n: int, d: int, budget: Budget, precision: str = "fp32") -> Run:
    """`sanitizer_graph`, loaded."""
    return _loaded(sanitizer_graph(n, d, budget, precision))


@cache
def select(model: LanguageModel, budget: Budget, tokens: int, precision: str = "fp32") -> Run:
    """`select_graph`, loaded."""
    return _loaded(select_graph(model, budget, tokens, precision))


def operators_on_fp16(graph: Graph) -> set[str]:
    """The standard operators that are given an fp16 tensor, functions inlined."""
    with tempfile.TemporaryDirectory() as folder:
        model = onnx.load(Path(folder) / graph.save(Path(folder), "graph.onnx").file)
    model = onnx.shape_inference.infer_shapes(onnx.inliner.inline_local_functions(model), strict_mode=True)
    fp16 = {
        value.name
        for value in [*model.graph.input, *model.graph.output, *model.graph.value_info]
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16
    }
    return {node.op_type for node in model.graph.node if fp16.intersection(node.input)}


def _plan(facts: PlanFacts, budget: Budget) -> Any:
    return load_method("sinkpruner").build(facts, budget)


def _loaded(graph: Graph) -> Run:
    backend = load_backend("ort-cpu", threads=2)
    with tempfile.TemporaryDirectory() as folder:
        spec = graph.save(Path(folder), "graph.onnx")
        engine = backend.load(Path(folder) / spec.file)

    def run(**inputs: Array) -> dict[str, Array]:
        outputs = engine({name: backend.tensor(array) for name, array in inputs.items()})
        return {name: backend.numpy(tensor) for name, tensor in outputs.items()}

    return run
