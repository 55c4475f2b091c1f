"""Plan graphs as the exporter writes them, each built and loaded once, run on arrays."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import onnx.inliner

from sinkprune.contract.budgets import Budget
from sinkprune.contract.errors import BundleError
from sinkprune.contract.files.held_files import HeldFile
from sinkprune.contract.manifest import DialectName, LanguageModel
from sinkprune.contract.precision import Array
from sinkprune.export import bundle_writer
from sinkprune.export.checkpoint.presets import RandomWeights
from sinkprune.export.dialects import load_dialect, opset24
from sinkprune.export.families import Family
from sinkprune.export.graph import Graph, WeightedGraph
from sinkprune.export.methods import load_method
from sinkprune.export.pruning import equal_mean
from sinkprune.export.pruning.plan import PlanFacts, PlanGraphs
from sinkprune.export.pruning.select import (
    ChooseQueries,
    best_of_each_image,
    best_of_one_image,
    build_select,
    every_text_row,
)
from sinkprune.export.weights import PRECISIONS, FloatForm
from sinkprune.runtime.backends import load_backend
from sinkprune.runtime.backends.models import Model

Run = Callable[..., dict[str, Array]]
"""A graph as a function from its inputs, by name, to its outputs."""


def language_model(num_heads: int = 4, num_kv_heads: int = 4, head_dim: int = 8) -> LanguageModel:
    """Facts of a small decoder of four layers, the first cut after layer 0."""
    d = num_heads * head_dim
    return LanguageModel(d, 2 * d, 4, num_heads, num_kv_heads, head_dim, 100, 4096, 10000.0)


def sanitizer_graph(n: int, d: int, budget: Budget, precision: str = "fp32") -> Graph:
    """`sanitizer` of `budget` for groups of `n` tokens of width `d`."""
    return load_method("sinkpruner")(facts_of(language_model(), precision, n=n, d=d), budget).sanitizer


def select_graph(model: LanguageModel, budget: Budget, tokens: int, precision: str = "fp32") -> Graph:
    """The first `select_after_*` of `budget` for an image of `tokens` visual tokens."""
    facts = facts_of(model, precision, n=tokens, d=model.hidden_size)
    return load_method("sinkpruner")(facts, budget).select_after[0]


@cache
def sanitizer(n: int, d: int, budget: Budget, precision: str = "fp32") -> Run:
    """`sanitizer_graph`, loaded."""
    return loaded(sanitizer_graph(n, d, budget, precision))


@cache
def select(model: LanguageModel, budget: Budget, tokens: int, precision: str = "fp32") -> Run:
    """`select_graph`, loaded."""
    return loaded(select_graph(model, budget, tokens, precision))


def method_plan(
    method: str, n: int, d: int, budget: Budget, precision: str = "fp32", dialect: DialectName = "opset24"
) -> PlanGraphs:
    """The plan of any method on a 32-layer decoder, for groups of `n` tokens of width `d`."""
    return load_method(method)(_deep_facts(n, d, precision, dialect), budget)


@cache
def method_sanitizer(method: str, n: int, d: int, budget: Budget, precision: str = "fp32") -> Run:
    """The sanitizer of `method_plan`, loaded."""
    graph = method_plan(method, n, d, budget, precision).sanitizer
    assert graph is not None
    return loaded(graph)


def tokens_into_llm(n: int, budget: Budget) -> int:
    """The k of `method_plan` for methods that keep as many as the budget's mean."""
    return equal_mean.tokens_into_llm(_deep_facts(n, 1, "fp32"), budget)


def facts_of(
    model: LanguageModel, precision: str = "fp32", *, n: int = 1, d: int = 1, causal: bool = True
) -> PlanFacts:
    """The facts of a decoder `model`, and of a tower that gives `n` tokens of width `d`."""
    return PlanFacts(model, n, d, PRECISIONS[precision], opset24, causal=causal)


@cache
def asked_select(
    model: LanguageModel, kept: int, budget: Budget, queries: ChooseQueries, precision: str = "fp32"
) -> Run:
    """A select that keeps the `kept` visual rows the rows of `queries` attend to most, loaded."""
    return _select(facts_of(model, precision), best_of_one_image(kept), budget, queries)


@cache
def quota_select(model: LanguageModel, images: int, budget: Budget, precision: str = "fp32") -> Run:
    """A select of every text row that keeps the own quota of each of up to `images` images, loaded."""
    return _select(facts_of(model, precision), best_of_each_image(images), budget, every_text_row)


def _select(facts: PlanFacts, *rule: Any) -> Run:
    graph = Graph("select", facts.precision, opset24)
    build_select(graph, facts, *rule)
    return loaded(graph)


def parameters_of(family: Family) -> int:
    """How many weights an export of the family says it will write."""
    shallow: list[list[WeightedGraph]] = [[], []]
    for layers, graphs in enumerate(shallow, 1):
        for name, write in family.graphs([range(layers)], ()).items():
            graphs.append(WeightedGraph(name, PRECISIONS["fp32"], opset24, FloatForm("fp32"), RandomWeights().tensor))
            write(graphs[-1])
    return bundle_writer.weight_bytes_of(family, shallow, PRECISIONS["fp32"]) // 4


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


def _deep_facts(n: int, d: int, precision: str, dialect: DialectName = "opset24") -> PlanFacts:
    model = replace(language_model(), num_layers=32)
    return PlanFacts(model, n, d, PRECISIONS[precision], load_dialect(dialect))


def loaded(graph: Graph, library: str = "ort-cpu") -> Run:
    """A graph, ready to run by the backend `library`."""
    backend = load_backend(library, threads=1)
    with tempfile.TemporaryDirectory() as folder:
        spec = graph.save(Path(folder), "graph.onnx")
        file = HeldFile(Path(folder) / spec.file, BundleError)
        engine = backend.load(Model("graph", spec, spec.file, {spec.file: file}, 0))

    def run(**inputs: Array) -> dict[str, Array]:
        outputs = engine({name: backend.tensor(array) for name, array in inputs.items()})
        return {name: backend.numpy(tensor) for name, tensor in outputs.items()}

    return run
