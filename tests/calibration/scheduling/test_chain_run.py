"""The chain graph by graph: the logits that a request gives, and the products of what layers are given."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from PIL import Image
from skimage import data

from sinkprune import Pipeline
from sinkprune.calibration.quantising.graphs import (
    ChainRun,
    Products,
    WeightGraphs,
    encode_prompts,
    linear_layers,
    weight_graphs,
)
from sinkprune.calibration.tasks import Item
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.questions import Question
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
    [
        ("gqa-112", "opset24"),
        ("gqa-112", "opset20"),
        ("next", "opset24"),
        ("qwen", "opset24"),
        ("qwen2-vl", "opset24"),
    ],
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
