"""The chain graph by graph: the logits that a request gives, and the products of what layers are given."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper
from PIL import Image
from skimage import data

from sinkprune import Pipeline
from sinkprune.calibration import quantise as cost
from sinkprune.calibration.tasks import Item
from sinkprune.calibration.weight_graphs import (
    ChainRun,
    GraphRun,
    GraphSession,
    Layer,
    Products,
    WeightGraphs,
    encode_prompts,
    linear_layers,
    weight_graphs,
)
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.questions import Question
from sinkprune.runtime.families import load_family
from sinkprune.runtime.media.picture_warnings import picture_facts
from support.models.manifests import file_of
from support.references.steps import watched

Bundles = Callable[..., Path]


def items() -> list[Item]:
    """Two questions about two photos of different sizes."""
    photo = Image.fromarray(data.coffee())
    asked = [(photo.resize((200, 150)), "What is this?"), (photo.resize((90, 210)), "Is there a cup on it?")]
    return [
        Item(Question(str(number), "all", text, ("a cup",)), str(number), picture.copy, picture_facts(picture))
        for number, (picture, text) in enumerate(asked)
    ]


@pytest.mark.parametrize(
    ("name", "dialect"),
    [("gqa-112", "opset20"), *((name, "opset24") for name in ("gqa-112", "next", "qwen", "qwen2-vl", "qwen3-vl"))],
)
def test_the_logits_are_those_of_a_request(
    name: str, dialect: str, bundle: Bundles, pipeline: Callable[..., Pipeline]
) -> None:
    read, pipe = read_bundle(bundle(name, dialect=dialect)), pipeline(name, dialect=dialect)
    graphs, run = WeightGraphs(read, read.manifest.weights, 1), ChainRun(read, encode_prompts(read, items()))
    for graph in weight_graphs(read.manifest):
        run.advance(graphs.run(graph, run.feeds).outputs())
    expected = [
        watched(pipe, item.load_image(), item.question.prompt, max_new_tokens=1).logits[0] for item in items()
    ]
    assert len(run.logits) == 2
    np.testing.assert_allclose(run.logits, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())


def test_products_are_those_of_each_layers_inputs(bundle: Bundles) -> None:
    read = read_bundle(bundle("gqa-112"))
    graphs, random = WeightGraphs(read, read.manifest.weights, 1), np.random.default_rng(1)
    width = read.manifest.graphs["projector"].inputs[0].shape[2]
    feeds = [{"tokens": random.standard_normal((1, rows, width), np.float32)} for rows in (5, 9)]
    products = Products(graphs.read("projector"), lambda: graphs.run("projector", feeds))
    first, second = linear_layers(graphs.read("projector"))
    seen = np.concatenate([feed["tokens"][0] for feed in feeds])
    np.testing.assert_allclose(products(first).products, seen.T @ seen, rtol=1e-4, atol=1e-3)
    held = {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in onnx.load(file_of(read, "projector")).graph.initializer
    }
    inner = seen @ held[first] + held[first.replace(".weight", ".bias")]
    # GELU, by the error function's integral.
    inner = inner * 0.5 * (1 + np.vectorize(math.erf)(inner / np.sqrt(2)))
    np.testing.assert_allclose(products(second).products, inner.T @ inner, rtol=1e-3, atol=1e-3 * (inner**2).sum())
    np.testing.assert_allclose(products(first).products, seen.T @ seen, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["gqa-112", "qwen"])
def test_a_graph_loads_each_matrix_once(name: str, bundle: Bundles) -> None:
    read, picture = read_bundle(bundle(name)), Image.fromarray(data.coffee())
    graph = WeightGraphs(read, read.manifest.weights, 1).read("vision")
    family, folder = load_family(read.manifest), file_of(read, "vision").parent
    feeds = [dict(family.inputs(picture.resize(size))) for size in ((200, 150), (90, 210))]
    matrices, loaded = linear_layers(graph), list[str]()

    def opened(part: ir.Graph) -> GraphSession:
        held = [matrix for matrix in part.initializers if matrix in matrices]
        assert len(held) <= 5
        loaded.extend(held)
        return GraphSession(part, 12, folder, 1)

    GraphRun(graph, opened, feeds).outputs()
    assert sorted(loaded) == sorted(matrices)


def test_what_it_costs_is_that_of_the_largest_subgraph(monkeypatch: pytest.MonkeyPatch) -> None:
    # A busy machine is not as fast in each measurement.
    monkeypatch.setattr(cost, "_operations_a_second", lambda: 1e9)
    attention = [Layer(name, 4096, 4096) for name in ("x", "x", "x", "y")]
    mlp = [Layer("z", 4096, 11008), Layer("z", 4096, 11008), Layer("w", 11008, 4096)]
    few, many = (cost.estimate({"decoder_0": [attention, mlp] * count}, {"decoder_0": 1000}, 7) for count in (2, 32))
    assert few.bytes == many.bytes and many.weights == 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert many.seconds == pytest.approx(16 * few.seconds) and few.seconds > 0
    # The products of both inputs, and three floats in 64 bits of the wider while they are inverted.
    assert 4 * (4096**2 + 11008**2) + 24 * 11008**2 < few.bytes < 8 << 30
