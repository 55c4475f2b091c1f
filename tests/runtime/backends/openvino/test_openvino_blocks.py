"""Graphs that are changed for OpenVINO: rows fill whole blocks, and are rounded to int8 for every quantised form."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import BackendError
from sinkprune.contract.files.held_files import HeldFile
from sinkprune.contract.precision import Array, PrecisionName, WeightsName
from sinkprune.export.dialects import load_dialect
from sinkprune.export.graph import WeightedGraph
from sinkprune.export.weights import PRECISIONS, form_of
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.backends.openvino import graphs as openvino_blocks
from sinkprune.runtime.backends.openvino.backend import DEVICES, Cpu, OpenVinoBackend, import_openvino
from sinkprune.runtime.backends.openvino.graphs import fill_blocks, group_in_int8, reader_of
from support.programs.slow_cases import slow_except
from support.references.same_answers import assert_equal_at_both_ends
from support.stand_ins.processor_features import assert_error, rounds_to_int8

openvino = import_openvino("openvino")
ops = openvino.opset15
TOWERS = {"gqa-112": 17, "next": 17, "qwen": 17, "qwen2-vl": 17, "qwen3-vl": 40}
"""How often a tower repeats and drops rows: around attention, and where patches are merged into tokens."""
BLOCK, FEW = 8, 3
WIDTH = 6
DEEPSTACK = 3
"""Layers of Qwen3-VL's first segment that it adds rows to."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small models have several."""
    monkeypatch.setattr(openvino_blocks, "BLOCK", BLOCK)
    monkeypatch.setattr(openvino_blocks, "FEW", FEW)


class Filling(Cpu):
    """Fills blocks whatever the processor has, and in fp32 too, where answers can be compared."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.fills_blocks = True


@pytest.mark.parametrize("name", slow_except({"qwen"}, TOWERS))
def test_answers_stay_the_same(
    name: str, bundle: Callable[..., Path], photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = bundle(name, weights="int8")
    theirs = Pipeline.load(root, backend="openvino", compute="fp32")
    monkeypatch.setitem(DEVICES, "openvino", Filling)
    ours = Pipeline.load(root, backend="openvino", compute="fp32")
    assert_equal_at_both_ends(ours, theirs, photo)


def matrix(draw: np.random.Generator) -> Any:
    codes = draw.integers(-127, 128, (WIDTH, WIDTH)).astype(np.int8)
    scales = draw.random((1, WIDTH)).astype(np.float32) / 127
    return ops.multiply(ops.convert(ops.constant(codes), np.float32), ops.constant(scales))


def decoder_layer(quantised: bool = True) -> Any:
    """A model of x [groups,rows,WIDTH]: a norm, a layer, rows that meet one another, a layer, and the sum of both.

    Outputs are that, and the shapes of both layers' results.
    """
    draw = np.random.default_rng(0)
    shape = WIDTH, WIDTH
    first, second = (matrix(draw) if quantised else ops.constant(draw.random(shape, np.float32)) for _ in range(2))
    x = ops.parameter([-1, -1, WIDTH], np.float32, name="x")
    normed = ops.divide(x, ops.sqrt(ops.add(ops.reduce_mean(ops.multiply(x, x), [-1], True), np.float32(1))))
    query = ops.matmul(normed, first, False, False)
    weights = ops.softmax(ops.matmul(query, x, False, True), -1)
    own = ops.matmul(ops.matmul(weights, query, False, False), second, False, False)
    results = [ops.result(ops.add(query, own)), *(ops.result(ops.shape_of(product)) for product in (query, own))]
    return openvino.Model(results, [x])


def compiled(model: Any, group: int = 0) -> Callable[..., list[Array]]:
    """What computes `model`, in fp32 but for what is rounded in such groups."""
    properties = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": group}
    request = reader_of(openvino).core.compile_model(model, "CPU", properties).create_infer_request()
    return lambda *inputs: [value.copy() for value in request.infer(list(inputs)).values()]


def rows_of_products(model: Any) -> Callable[..., list[int]]:
    """What tells how many rows each product with a constant matrix has, as `model` is computed."""
    layers = [node for node in model.get_ordered_ops() if node.get_type_name() == "MatMul"]
    layers = [node for node in layers if node.input_value(1).get_partial_shape().is_static]
    shapes = compiled(openvino.Model([ops.result(ops.shape_of(node)) for node in layers], model.get_parameters()))
    return lambda *inputs: [int(shape[-2]) for shape in shapes(*inputs)]


def test_products_have_whole_blocks_and_all_else_what_it_had() -> None:
    """Of every count of rows, of few and of several groups too, which stay as they are."""
    model = decoder_layer()
    fill_blocks(openvino, model)
    expected, found, rows_of = compiled(decoder_layer()), compiled(model), rows_of_products(model)
    for groups, rows in product((1, 2, 3), range(1, 3 * BLOCK + 1)):
        x = np.random.default_rng(rows).standard_normal((groups, rows, WIDTH), np.float32)
        for value, own in zip(found(x), expected(x), strict=True):
            np.testing.assert_allclose(value, own, rtol=1e-5, atol=1e-6)
        full = -(-rows // BLOCK) * BLOCK if rows > FEW and groups == 1 else rows
        assert rows_of(x) == [full, full], (groups, rows)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, {}) for name in TOWERS),
        ("gqa-112", {"precision": "fp16"}),
        ("qwen3-vl", {"precision": "fp16"}),
        ("qwen", {"dialect": "opset20"}),
    ],
)
def test_rows_are_repeated_and_dropped_only_where_they_meet(
    name: str, form: dict[str, str], bundle: Callable[..., Path]
) -> None:
    """An operator that is not known to compute each row by itself would cut every layer in two, at every token."""
    opened = read_bundle(bundle(name, weights="int8", **form))
    reader = reader_of(openvino)
    # What reads decoders of opset20 are other engines.
    kinds_of_graphs = ("vision",) if "dialect" in form else ("vision", "decoder_")
    for graph in (graph for graph in opened.manifest.graphs if graph.startswith(kinds_of_graphs)):
        read = reader.read(Model.of_bundle(opened, graph))
        before = kinds(read)
        fill_blocks(openvino, read)
        added = kinds(read) - before
        if graph == "vision":
            assert added["Gather"] == TOWERS[name]
        else:
            # Before and behind each attention; what comes in (twice) and goes out; two of sizes in each of two parts.
            deepstack = sum("deepstack" in port.any_name for port in read.inputs)
            assert added["Gather"] == 2 * before["ScaledDotProductAttention"] + 7 + DEEPSTACK * deepstack


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: ops.mvn(x, np.array([-2]), True, 1e-5, "inside_sqrt"),
        lambda x: ops.reduce_mean(x, np.array([-2, -1]), True),
        lambda x: ops.unsqueeze(ops.reduce_mean(x, np.array([-1]), False), np.int64(0)),
    ],
    ids=["a norm over rows", "a mean over rows", "a mean that leaves no features"],
)
def test_what_mixes_rows_sees_no_row_twice(mix: Callable[[Any], Any]) -> None:
    def model() -> Any:
        x = ops.parameter([-1, -1, WIDTH], np.float32, name="x")
        layer = ops.matmul(x, matrix(np.random.default_rng(0)), False, False)
        return openvino.Model([ops.result(mix(layer))], [x])

    filled = model()
    fill_blocks(openvino, filled)
    x = np.random.default_rng(1).standard_normal((1, BLOCK - 2, WIDTH), np.float32)
    (found,), (expected,) = compiled(filled)(x), compiled(model())(x)
    assert rows_of_products(filled)(x) == [BLOCK]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def kinds(read: Any) -> Counter[str]:
    return Counter(node.get_type_name() for node in read.get_ops())


def test_amx_is_found_where_the_processor_has_it() -> None:
    imported = "from sinkprune.runtime.backends import load_backend"
    told = f"{imported}; print(load_backend('openvino')._device.fills_blocks)"
    has_amx = "amx_bf16" in Path("/proc/cpuinfo").read_text()
    # Held to AVX2, OpenVINO says that it has bf16, and cannot compute in it.
    for held, expected in (("DEFAULT", has_amx), ("AVX512_CORE_VNNI", False), ("AVX2", False)):
        environment = os.environ | {"ONEDNN_MAX_CPU_ISA": held}
        found = subprocess.check_output([sys.executable, "-c", told], env=environment, text=True)
        assert found == f"{expected}\n"


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


def layers(stored: Stored, folder: Path) -> list[Any]:
    """OpenVINO's models of a graph of one linear layer: as a bundle's is read, and as an engine's is."""

    def read(name: str, shape: object) -> Array:
        return np.random.default_rng(1).standard_normal((OUTPUTS, INPUTS), np.float32)

    form = form_of(stored.weights, stored.block)
    graph = WeightedGraph("layer", PRECISIONS[stored.precision], load_dialect("opset24"), form, read)
    x = graph.input("x", [1, "rows", INPUTS])
    graph.output("y", graph.linear(x, "own", INPUTS, OUTPUTS, bias=False), [1, "rows", OUTPUTS])
    spec = graph.save(folder, "layer.onnx")
    files = {name: HeldFile(folder / name, BackendError) for name in (spec.file, "weights/layer.bin")}
    model, engine = Model("layer", spec, spec.file, files, graph.bytes), folder / "engine.xml"
    OpenVinoBackend("openvino", None, "fp32").write(model, engine)
    reader = reader_of(openvino)
    return [reader.read(model), reader.core.read_model(engine)]


@pytest.mark.parametrize("stored", [*FLOATS, *QUANTISED, *IN_FP16], ids=name_of)
def test_rows_for_every_quantised_form_are_rounded_in_the_largest_groups_that_its_blocks_permit(
    stored: Stored, tmp_path: Path
) -> None:
    """Where the processor multiplies int8; elsewhere OpenVINO computes in fp32.

    With a group larger than a block, or none, OpenVINO computes in fp32 everywhere, in up to twice the time.
    """
    largest = 0 if stored in FLOATS else min(stored.block or INPUTS, LARGEST_GROUP)
    rows = np.random.default_rng(0).standard_normal((1, 5, INPUTS), np.float32)
    rows = rows.astype(PRECISIONS[stored.precision].numpy)
    for model in layers(stored, tmp_path):
        assert group_in_int8(model) == largest
        exact, rounded = (compiled(model, group)(rows)[0].astype(np.float32) for group in (0, largest))
        error = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
        assert_error(error, rounded=bool(largest) and rounds_to_int8(), least=1e-3, most=0.02, exact=1e-6)
