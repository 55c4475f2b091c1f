"""The matrices of OpenVINO models: turned in engines to how OpenVINO lays its own, and the groups that rows have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from PIL import Image

from commands import run
from same_answers import QUESTION
from sinkprune import Pipeline
from sinkprune.contract.errors import BackendError
from sinkprune.contract.held_files import HeldFile
from sinkprune.contract.precision import Array, PrecisionName, WeightsName
from sinkprune.export.dialects import DIALECTS
from sinkprune.export.graph import WeightedGraph
from sinkprune.export.precision import PRECISIONS
from sinkprune.export.weight_forms import form_of
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.backends.openvino import OpenVinoBackend
from sinkprune.runtime.backends.openvino_graphs import GraphReader
from sinkprune.runtime.backends.openvino_matrices import group_in_int8, matrices, turn_matrices
from sinkprune.runtime.openvino_library import import_openvino

openvino = import_openvino("openvino")
# Three blocks of the largest, and outputs that leave half a byte of their zero points.
INPUTS, OUTPUTS = 384, 73
LARGEST_GROUP = 128


class Stored(NamedTuple):
    """A form of weights, and what is known of it."""

    weights: WeightsName
    block: int | None = None
    precision: PrecisionName = "fp32"

    @property
    def blocks(self) -> int:
        """How many scales an output has."""
        return INPUTS // self.block if self.block else 1


FLOATS = [Stored("fp32"), Stored("fp16"), Stored("bf16"), Stored("fp16", precision="fp16")]
QUANTISED = [Stored("int8"), *(Stored(form, block) for form in ("int4", "uint4") for block in (32, 64, 128))]
IN_FP16 = [Stored("int8", precision="fp16"), Stored("uint4", 64, "fp16")]


def name_of(stored: Stored) -> str:
    return "-".join(str(part) for part in stored if part is not None)


@pytest.fixture(params=[*FLOATS, *QUANTISED, *IN_FP16], ids=name_of)
def stored(request: pytest.FixtureRequest) -> Stored:
    found: Stored = request.param
    return found


@pytest.fixture
def layer(stored: Stored, tmp_path: Path) -> Model:
    """A graph of one linear layer of that form."""
    values = np.random.default_rng(1).standard_normal((OUTPUTS, INPUTS), np.float32)
    graph = WeightedGraph(
        "layer",
        PRECISIONS[stored.precision],
        DIALECTS["opset24"],
        form_of(stored.weights, stored.block),
        lambda name, shape: values,
    )
    x = graph.input("x", [1, "rows", INPUTS])
    graph.output("y", graph.linear(x, "own", INPUTS, OUTPUTS, bias=False), [1, "rows", OUTPUTS])
    spec = graph.save(tmp_path, "layer.onnx")
    files = {name: HeldFile(tmp_path / name, BackendError) for name in (spec.file, "weights/layer.bin")}
    return Model("layer", spec, spec.file, files, graph.bytes)


def written(layer: Model, folder: Path) -> Any:
    """The model that is written of a graph, read again."""
    OpenVinoBackend("openvino", None, "fp32").write(layer, folder / "written.xml")
    return openvino.Core().read_model(folder / "written.xml")


def computed(model: Any, rows: Array, **properties: object) -> Array:
    """`rows` times the matrix."""
    compiled = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32", **properties})
    result: Array = compiled.create_infer_request().infer([rows])[0].copy()
    return result


def slowly_read(constant: Any) -> Array:
    """The values of a constant, one by one where they have 4 bits."""
    shape, kind = list(constant.get_output_shape(0)), constant.get_element_type().get_type_name()
    data = np.asarray(constant.data)
    if kind not in ("i4", "u4"):
        return data.reshape(shape)
    halves = [half for byte in data.view(np.uint8).ravel().tolist() for half in (byte & 15, byte >> 4)]
    values = [half - 16 if kind == "i4" and half > 7 else half for half in halves[: np.prod(shape)]]
    return np.array(values).reshape(shape)


@pytest.mark.parametrize("stored", [*QUANTISED, *IN_FP16], ids=name_of)
def test_an_engine_has_the_bundle_s_values_in_openvino_s_own_layout(
    stored: Stored, layer: Model, tmp_path: Path
) -> None:
    graph = onnx.load(layer.file.path).graph
    expected = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    found = written(layer, tmp_path)
    (product,) = (node for node in found.get_ops() if node.get_type_name() == "MatMul")
    assert product.get_attributes()["transpose_b"]
    constants = [node for node in found.get_ops() if node.get_type_name() == "Constant"]
    matrix, *others = sorted(
        (node for node in constants if node.get_element_type().get_type_name() != "i64"),
        key=lambda node: -np.prod(node.get_output_shape(0)),
    )
    codes = expected.pop("own.weight")
    blocked = [OUTPUTS, stored.blocks, INPUTS // stored.blocks] if stored.blocks > 1 else [OUTPUTS, INPUTS]
    np.testing.assert_array_equal(slowly_read(matrix), codes.astype(slowly_read(matrix).dtype).T.reshape(blocked))
    by_type = {node.get_element_type().get_type_name(): slowly_read(node) for node in others}
    assert len(by_type) == len(others) == len(expected)
    for name, values in expected.items():
        turned = by_type["u4" if name.endswith("zero") else "f16" if stored.precision == "fp16" else "f32"]
        np.testing.assert_array_equal(turned, values.reshape(stored.blocks, OUTPUTS).T.reshape([*blocked[:-1], 1]))


def test_an_engine_computes_what_the_bundle_does(stored: Stored, layer: Model, tmp_path: Path) -> None:
    dtype = PRECISIONS[stored.precision].numpy
    rows = np.random.default_rng(0).standard_normal((1, 5, INPUTS), np.float32).astype(dtype)
    reader = GraphReader(openvino, openvino.Core())
    expected, found = (
        computed(model, rows, DYNAMIC_QUANTIZATION_GROUP_SIZE=0)
        for model in (reader.read(layer), written(layer, tmp_path))
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("stored", QUANTISED, ids=name_of)
def test_rows_of_every_quantised_form_are_rounded(stored: Stored, layer: Model, tmp_path: Path) -> None:
    """A group larger than a block of the weights, and OpenVINO would not round: half as fast, as exact as in fp32."""
    rows = np.random.default_rng(0).standard_normal((1, 5, INPUTS), np.float32)
    reader = GraphReader(openvino, openvino.Core())
    for model in (reader.read(layer), written(layer, tmp_path)):
        group = group_in_int8(model)
        assert group == min(stored.block or INPUTS, LARGEST_GROUP)
        exact, rounded = (computed(model, rows, DYNAMIC_QUANTIZATION_GROUP_SIZE=size) for size in (0, group))
        error = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
        assert 1e-3 < error < 0.02


@pytest.mark.parametrize("stored", FLOATS, ids=name_of)
def test_floats_are_neither_turned_nor_are_their_rows_rounded(stored: Stored, layer: Model, tmp_path: Path) -> None:
    """OpenVINO 2026.4 ends the process where it fuses turned ones, with AMX and one thread."""
    for model in (GraphReader(openvino, openvino.Core()).read(layer), written(layer, tmp_path)):
        (matrix,) = matrices(model)
        assert not matrix.product.get_attributes()["transpose_b"]
        assert group_in_int8(model) == 0


@pytest.mark.parametrize("shape", [(4,), (2, 4, 5), (4, 5)], ids=str)
def test_what_is_no_linear_layer_s_is_left_alone(shape: tuple[int, ...]) -> None:
    """Constants of other ranks, and what is computed of something else too."""
    ops, draw = openvino.opset15, np.random.default_rng(0)
    x = ops.parameter([2, 3, 4], np.float32)
    constant = ops.constant(draw.standard_normal(shape, np.float32))
    # 1, but not known before it is run.
    one = ops.exp(ops.multiply(ops.reduce_max(x, np.array([0, 1, 2])), np.float32(0)))
    right = ops.multiply(one, constant) if len(shape) == 2 else constant
    model = openvino.Model([ops.matmul(x, right, False, False)], [x], "model")
    rows = draw.standard_normal((2, 3, 4), np.float32)
    expected = computed(model, rows)
    assert not list(matrices(model))
    turn_matrices(model, openvino)
    np.testing.assert_array_equal(computed(model, rows), expected)


@pytest.mark.parametrize("weights", ["bf16", "int8", "uint4"])
def test_engines_answer_as_their_bundle(
    weights: str, bundle: Callable[..., Path], photo: Image.Image, tmp_path: Path
) -> None:
    root = bundle("gqa-112", budgets=("retain-64",), weights=weights)
    outcome = run("sinkprune-build", root, "-o", tmp_path / "engines", "--target", "openvino")
    assert outcome.code == 0, outcome.stderr
    pipelines = [Pipeline.load(path, backend="openvino", compute="fp32") for path in (root, tmp_path / "engines")]
    for budget in ("none", "retain-64"):
        answers = [each.generate(photo, QUESTION, budget=budget, max_new_tokens=6) for each in pipelines]
        assert answers[0].token_ids == answers[1].token_ids
        np.testing.assert_array_equal(answers[0].kept.index, answers[1].kept.index)
