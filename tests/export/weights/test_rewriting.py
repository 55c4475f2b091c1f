"""Graphs of a bundle, rewritten with quantised matrices, equal those that the export writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from sinkprune.calibration.weight_graphs import RewrittenGraph, read_graph
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.precision import Array, WeightsName
from sinkprune.export.dialects import load_dialect
from sinkprune.export.weights import PRECISIONS, form_of
from sinkprune.export.weights.rounding import to_nearest
from sinkprune.runtime.backends.models import Model
from support.models.manifests import file_of
from support.programs.slow_cases import slow

Bundles = Callable[..., Path]


def rewritten(bundle: Path, graph: str, weights: WeightsName, folder: Path, rounding: Any = to_nearest) -> Path:
    """The graph's file of `bundle`, written again in `folder`."""
    read = read_bundle(bundle)
    manifest, model = read.manifest, Model.of_bundle(read, graph)
    held = {weight.name: weight for weight in model.weights}
    again = RewrittenGraph(
        graph,
        PRECISIONS[manifest.precision],
        load_dialect(manifest.dialect),
        form_of(weights, 128, rounding=rounding),
        read_graph(model.onnx),
        lambda name: model.weight(held[name]),
    )
    assert again.save(folder, manifest.graphs[graph].file) == manifest.graphs[graph]
    return folder / manifest.graphs[graph].file


def content(path: Path) -> tuple[Counter[str], list[Any], dict[str, Array]]:
    """How often each operator stands in a graph, what it takes and gives, and its weights."""
    model = onnx.load(path)
    onnx.checker.check_model(str(path))
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    nodes = Counter(node.op_type for node in model.graph.node)
    return nodes, [*model.graph.input, *model.graph.output, *model.opset_import], weights


@pytest.mark.parametrize(
    ("name", "precision", "dialect", "graphs", "weights"),
    [
        ("gqa-112", "fp32", "opset24", ["vision", "projector", "decoder_0", "decoder_2", "head"], "int8"),
        ("gqa-112", "fp32", "opset24", ["projector", "decoder_0", "decoder_2", "head"], "int4"),
        slow(("gqa-112", "fp16", "opset20", ["vision", "decoder_1"], "int4")),
        ("qwen", "fp32", "opset24", ["vision", "decoder_0"], "int8"),
        slow(("qwen2-vl", "fp32", "opset24", ["vision"], "int8")),
        ("next", "fp32", "opset24", ["projector"], "int4"),
    ],
)
def test_it_is_what_the_export_writes(
    name: str,
    precision: str,
    dialect: str,
    graphs: Sequence[str],
    weights: WeightsName,
    bundle: Bundles,
    tmp_path: Path,
) -> None:
    floats = bundle(name, precision, dialect=dialect)
    exported = bundle(name, precision, dialect=dialect, weights=weights)
    for graph in graphs:
        path = rewritten(floats, graph, "int8" if graph == "vision" else weights, tmp_path)
        found, expected = content(path), content(file_of(read_bundle(exported), graph))
        assert found[:2] == expected[:2]
        assert found[2].keys() == expected[2].keys()
        for weight, array in expected[2].items():
            assert found[2][weight].dtype == array.dtype
            # An export rounds what was read; of a bundle in fp16 that is gone.
            if precision == "fp32":
                np.testing.assert_array_equal(found[2][weight], array)
