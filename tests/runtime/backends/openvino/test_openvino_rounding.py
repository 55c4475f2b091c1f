"""Rows are rounded to int8 for every quantised form, in groups that OpenVINO takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from sinkprune.contract.errors import BackendError
from sinkprune.contract.files.held_files import HeldFile
from sinkprune.contract.precision import Array, PrecisionName, WeightsName
from sinkprune.export.dialects import load_dialect
from sinkprune.export.graph import WeightedGraph
from sinkprune.export.weights import PRECISIONS, form_of
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.backends.openvino.backend import OpenVinoBackend, import_openvino
from sinkprune.runtime.backends.openvino.graphs import GraphReader, group_in_int8
from support.stand_ins.processor_features import assert_error, rounds_to_int8

openvino = import_openvino("openvino")
# Three blocks of the largest, and outputs that leave half a byte of their zero points.
INPUTS, OUTPUTS = 384, 73
LARGEST_GROUP = 128


class Stored(NamedTuple):
    """A form of weights."""

    weights: WeightsName
    block: int | None = None
    precision: PrecisionName = "fp32"


FLOATS = [Stored("fp32"), Stored("fp16"), Stored("bf16"), Stored("fp16", precision="fp16")]
QUANTISED = [Stored("int8"), *(Stored(form, block) for form in ("int4", "uint4") for block in (32, 64, 128))]
IN_FP16 = [Stored("int8", precision="fp16"), Stored("int4", 64, "fp16"), Stored("uint4", 64, "fp16")]


def name_of(stored: Stored) -> str:
    return "-".join(str(part) for part in stored if part is not None)


def layers(stored: Stored, folder: Path, inputs: int = INPUTS) -> list[Any]:
    """OpenVINO's models of a graph of one linear layer: as a bundle's is read, and as an engine's is."""

    def read(name: str, shape: object) -> Array:
        return np.random.default_rng(1).standard_normal((OUTPUTS, inputs), np.float32)

    form = form_of(stored.weights, stored.block)
    graph = WeightedGraph("layer", PRECISIONS[stored.precision], load_dialect("opset24"), form, read)
    x = graph.input("x", [1, "rows", inputs])
    graph.output("y", graph.linear(x, "own", inputs, OUTPUTS, bias=False), [1, "rows", OUTPUTS])
    spec = graph.save(folder, "layer.onnx")
    files = {name: HeldFile(folder / name, BackendError) for name in (spec.file, "weights/layer.bin")}
    model, engine = Model("layer", spec, spec.file, files, graph.bytes), folder / "engine.xml"
    OpenVinoBackend("openvino", None, "fp32").write(model, engine)
    core = openvino.Core()
    return [GraphReader(openvino, core).read(model), core.read_model(engine)]


def computed(model: Any, rows: Array, group: int) -> Array:
    """`rows` times the matrix, in fp32 but for what is rounded in such groups."""
    properties = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": group}
    compiled = openvino.Core().compile_model(model, "CPU", properties)
    result: Array = compiled.create_infer_request().infer([rows])[0].astype(np.float32)
    return result


@pytest.mark.parametrize("stored", [*QUANTISED, *IN_FP16], ids=name_of)
def test_rows_for_every_quantised_form_are_rounded(stored: Stored, tmp_path: Path) -> None:
    """Where the processor multiplies int8; elsewhere OpenVINO computes in fp32.

    With a group larger than a block, or none, OpenVINO computes in fp32 everywhere, in up to twice the time.
    """
    rows = np.random.default_rng(0).standard_normal((1, 5, INPUTS), np.float32)
    rows = rows.astype(PRECISIONS[stored.precision].numpy)
    for model in layers(stored, tmp_path):
        exact, rounded = (computed(model, rows, group) for group in (0, group_in_int8(model)))
        error = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
        assert_error(error, rounded=rounds_to_int8(), least=1e-3, most=0.02, exact=1e-6)


@pytest.mark.parametrize("stored", [*QUANTISED, *IN_FP16], ids=name_of)
def test_a_group_is_as_large_as_blocks_let_it_be(stored: Stored, tmp_path: Path) -> None:
    for model in layers(stored, tmp_path):
        assert group_in_int8(model) == min(stored.block or INPUTS, LARGEST_GROUP)


@pytest.mark.parametrize("stored", FLOATS, ids=name_of)
def test_rows_for_floats_are_not_rounded(stored: Stored, tmp_path: Path) -> None:
    for model in layers(stored, tmp_path):
        assert group_in_int8(model) == 0
