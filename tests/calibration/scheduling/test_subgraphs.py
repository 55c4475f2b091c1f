"""A graph in subgraphs: each layer runs once, few of them at a time, and little is kept between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from PIL import Image
from skimage import data

from sinkprune.calibration.quantising import quantise as cost
from sinkprune.calibration.quantising.graphs import (
    GraphRun,
    GraphSession,
    Layer,
    WeightGraphs,
    linear_layers,
    split_graph,
    weight_graphs,
)
from sinkprune.contract.bundle import Bundle, read_bundle
from sinkprune.runtime.families import load_family
from support.models.manifests import file_of

Bundles = Callable[..., Path]
NAMES = [("gqa-112", "opset24"), ("gqa-112", "opset20"), ("qwen", "opset24"), ("qwen3-vl", "opset24")]


def graphs_of(bundle: Bundle) -> WeightGraphs:
    return WeightGraphs(bundle, bundle.manifest.weights, 1)


@pytest.mark.parametrize(("name", "dialect"), NAMES)
def test_all_layers_are_in_them_in_order_and_few_at_a_time(name: str, dialect: str, bundle: Bundles) -> None:
    read = read_bundle(bundle(name, dialect=dialect))
    for graph in weight_graphs(read.manifest):
        read_graph = graphs_of(read).read(graph)
        layers, found = list(linear_layers(read_graph).values()), split_graph(read_graph)
        assert {value for subgraph in found for value in subgraph.layer_inputs} >= {layer.value for layer in layers}
        together = [[layer for layer in layers if layer.value in subgraph.layer_inputs] for subgraph in found]
        assert sorted(layer.value for group in together for layer in group) == sorted(layer.value for layer in layers)
        # Attention has four of them, an MLP three, a block of Qwen's tower five.
        assert max(map(len, together)) <= 5
        assert found[-1].outputs == tuple(value.name for value in read_graph.outputs)
        if graph.startswith("decoder"):
            # Hidden states and a mask; after the first layers also DeepStack's rows.
            assert all(len(subgraph.outputs) <= 2 for subgraph in found[8:-1])


@pytest.mark.parametrize("name", ["gqa-112", "qwen"])
def test_a_graph_gives_what_it_gives_in_one_piece_and_loads_each_matrix_once(name: str, bundle: Bundles) -> None:
    read, picture = read_bundle(bundle(name)), Image.fromarray(data.coffee())
    family, graph, folder = (
        load_family(read.manifest),
        graphs_of(read).read("vision"),
        file_of(read, "vision").parent,
    )
    feeds = [dict(family.inputs(picture.resize(size))) for size in ((200, 150), (90, 210))]
    matrices, loaded = linear_layers(graph), list[str]()

    def opened(part: ir.Graph) -> GraphSession:
        held = [matrix for matrix in part.initializers if matrix in matrices]
        assert len(held) <= 5
        loaded.extend(held)
        return GraphSession(part, 12, folder, 1)

    found = GraphRun(graph, opened, feeds).outputs()
    assert sorted(loaded) == sorted(matrices)
    whole = GraphSession(graphs_of(read).read("vision"), 12, folder, 1)
    for feed, given in zip(feeds, found, strict=True):
        expected = whole(feed)
        assert given.keys() == expected.keys()
        for value, array in expected.items():
            np.testing.assert_allclose(given[value], array, rtol=1e-3, atol=1e-4 * np.abs(array).max())


def test_what_it_costs_is_that_of_the_largest_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cost._operations_a_second() > 0
    # A busy machine is not as fast in each measurement.
    monkeypatch.setattr(cost, "_operations_a_second", lambda: 1e9)
    attention = [Layer(name, 4096, 4096) for name in ("x", "x", "x", "y")]
    mlp = [Layer("z", 4096, 11008), Layer("z", 4096, 11008), Layer("w", 11008, 4096)]
    few, many = (cost.estimate({"decoder_0": [attention, mlp] * count}, {"decoder_0": 1000}, 7) for count in (2, 32))
    assert few.bytes == many.bytes
    assert many.seconds == pytest.approx(16 * few.seconds) and few.seconds > 0
    # The products of both inputs, and three floats in 64 bits of the wider while they are inverted.
    assert few.bytes > 4 * (4096**2 + 11008**2) + 24 * 11008**2
    assert few.bytes < 8 << 30
    wider = cost.estimate({"decoder_0": [attention, mlp]}, {"decoder_0": 1000}, 7 + (1 << 30))
    assert wider.bytes == few.bytes + (1 << 30)
