"""Plan graphs as the exporter writes them, each built and loaded once, run on arrays."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from sinkprune.budgets import Budget
from sinkprune.bundle import LanguageModel
from sinkprune.export.graph import Graph
from sinkprune.export.methods import PlanFacts, load_method
from sinkprune.export.precision import PRECISIONS
from sinkprune.runtime.backends import load_backend

Array = np.ndarray[Any, Any]
Run = Callable[..., dict[str, Array]]
"""A graph as a function from its inputs, by name, to its outputs."""

NUM_LAYERS = 4
FIRST_CUT = 0
"""A decoder of four layers is cut after layers 0, 1 and 2."""


def language_model(num_heads: int = 4, num_kv_heads: int = 4, head_dim: int = 8) -> LanguageModel:
    """Facts of a small decoder."""
    d = num_heads * head_dim
    return LanguageModel(d, 2 * d, NUM_LAYERS, num_heads, num_kv_heads, head_dim, 100, 4096, 10000.0)


@cache
def sanitizer(n: int, d: int, budget: Budget, precision: str = "fp32") -> Run:
    """`sanitizer` of `budget` for groups of `n` tokens of width `d`."""
    plan = _method().build(PlanFacts(language_model(), n, d, PRECISIONS[precision]), budget)
    return _loaded(plan.sanitizer)


@cache
def select(model: LanguageModel, budget: Budget, tokens: int, precision: str = "fp32", cut: int = FIRST_CUT) -> Run:
    """`select_after_<cut>` of `budget` for an image of `tokens` visual tokens."""
    plan = _method().build(PlanFacts(model, tokens, model.hidden_size, PRECISIONS[precision]), budget)
    return _loaded(plan.select_after[cut])


def _method() -> Any:
    return load_method("sinkpruner")


def _loaded(graph: Graph) -> Run:
    backend = load_backend("ort-cpu", threads=2)
    with tempfile.TemporaryDirectory() as folder:
        spec = graph.save(Path(folder), "graph.onnx")
        engine = backend.load(Path(folder) / spec.file, spec)

    def run(**inputs: Array) -> dict[str, Array]:
        outputs = engine({name: backend.tensor(array) for name, array in inputs.items()})
        return {name: backend.numpy(tensor) for name, tensor in outputs.items()}

    return run
