"""The weight graphs of a bundle, with their floats and with quantised weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import onnx_ir as ir

from sinkprune.calibration.quantising.products import Layer, linear_layers
from sinkprune.calibration.quantising.subgraphs import GraphRun, GraphSession, Tensors, split_graph
from sinkprune.contract.bundle import Bundle
from sinkprune.contract.precision import Array, WeightForms, WeightsName
from sinkprune.export.dialects import DIALECTS
from sinkprune.export.precision import PRECISIONS
from sinkprune.export.rewriting import RewrittenGraph, read_graph
from sinkprune.export.weights.rounding import RoundingMethod
from sinkprune.export.weights.weight_forms import form_of
from sinkprune.runtime.backends.models import Model

_WANTED = ("tokens", "norms", "salience", "deepstack", "embeddings", "hidden_out", "logits")
"""Outputs of weight graphs that the next graph or the answer needs."""


class WeightGraphs:
    """The weight graphs of `bundle`, of which matrices will be stored in `forms`."""

    def __init__(self, bundle: Bundle, forms: WeightForms, threads: int) -> None:
        self._bundle, self._forms, self._threads = bundle, forms, threads
        self._dialect = DIALECTS[bundle.manifest.dialect]

    def changes(self, graph: str) -> bool:
        """Return whether the graph's matrices get another form."""
        return self._form(graph, self._forms) != self._form(graph, self._bundle.manifest.weights)

    def read(self, graph: str) -> ir.Graph:
        """Return the graph with its needed outputs only; raises what `Model.onnx` raises."""
        return _wanted(read_graph(Model.of_bundle(self._bundle, graph).onnx))

    def layers(self, graph: str) -> list[list[Layer]]:
        """Return the linear layers of each subgraph of a graph."""
        read = self.read(graph)
        layers = linear_layers(read).values()
        return [[layer for layer in layers if layer.value in subgraph.layer_inputs] for subgraph in split_graph(read)]

    def rewritten(self, graph: str, rounding: RoundingMethod) -> RewrittenGraph:
        """Return the graph with its matrices rounded by a rule; raises `UsageError` if one does not fit its form."""
        form = form_of(self._form(graph, self._forms), self._forms.block_size, rounding=rounding)
        precision, model = PRECISIONS[self._bundle.manifest.precision], Model.of_bundle(self._bundle, graph)
        weights = {weight.name: weight for weight in model.weights}

        def read(name: str) -> Array:
            return model.weight(weights[name])

        return RewrittenGraph(graph, precision, self._dialect, form, read_graph(model.onnx), read)

    def file(self, graph: str) -> str:
        """Return the name of the graph's ONNX file in the bundle."""
        return self._bundle.manifest.graphs[graph].file

    def run(self, graph: str, feeds: Iterable[Tensors]) -> GraphRun:
        """Return a run of prompts through the graph of floats; raises what `Model.onnx` raises."""
        return self._run(self.read(graph), Model.of_bundle(self._bundle, graph).file.path.parent, feeds)

    def run_written(self, graph: str, root: Path, feeds: Iterable[Tensors]) -> GraphRun:
        """Return a run of prompts through the graph in the folder `root`."""
        path = root / self.file(graph)
        return self._run(_wanted(read_graph(path.read_bytes())), path.parent, feeds)

    def _run(self, graph: ir.Graph, folder: Path, feeds: Iterable[Tensors]) -> GraphRun:
        return GraphRun(
            graph, lambda part: GraphSession(part, self._dialect.IR_VERSION, folder, self._threads), feeds
        )

    @staticmethod
    def _form(graph: str, forms: WeightForms) -> WeightsName:
        return forms.vision if graph == "vision" else forms.decoder


def _wanted(graph: ir.Graph) -> ir.Graph:
    graph.outputs[:] = [value for value in graph.outputs if value.name in _WANTED]
    return graph
