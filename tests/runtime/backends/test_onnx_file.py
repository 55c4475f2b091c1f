"""ONNX files are checked before they are loaded: they read no other file, and they end. Functions are inlined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import BackendError
from sinkprune.contract.files.held_files import HeldFile
from sinkprune.contract.manifest import GraphSpec, TensorSpec
from sinkprune.runtime.backends import load_backend
from sinkprune.runtime.backends.models import Model, checked_weights
from sinkprune.runtime.backends.onnxruntime.library import import_onnxruntime, session_options
from sinkprune.runtime.backends.openvino.graphs import inlined
from support.models.manifests import file_of

FLOATS = [
    helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"]),
    helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"]),
]
OPSETS = [helper.make_opsetid("", 21), helper.make_opsetid("ours", 1)]


def model_of(
    nodes: list[onnx.NodeProto],
    functions: list[onnx.FunctionProto] | None = None,
    weights: list[TensorProto] | None = None,
    inputs: Sequence[onnx.ValueInfoProto] = FLOATS[:1],
    outputs: Sequence[onnx.ValueInfoProto] = FLOATS[1:],
) -> bytes:
    graph = helper.make_graph(nodes, "graph", inputs, outputs, initializer=weights)
    model = helper.make_model(graph, functions=functions or [], opset_imports=OPSETS, ir_version=10)
    data: bytes = model.SerializeToString()
    return data


def endless_loop() -> onnx.NodeProto:
    condition = helper.make_tensor_value_info("go", TensorProto.BOOL, [])
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Identity", ["v"], ["w"])],
        "body",
        [helper.make_tensor_value_info("i", TensorProto.INT64, []), condition, FLOATS[0]],
        [helper.make_tensor_value_info("on", TensorProto.BOOL, []), FLOATS[1]],
    )
    return helper.make_node("Loop", ["", "", "x"], ["y"], body=body)


def function(name: str, calls: list[str]) -> onnx.FunctionProto:
    """A function that calls others one behind the other."""
    values = ["x", *(f"v{number}" for number in range(len(calls) - 1)), "y"]
    nodes = [
        helper.make_node(called, [values[number]], [values[number + 1]], domain="ours" if called != "Neg" else "")
        for number, called in enumerate(calls)
    ]
    return helper.make_function("ours", name, ["x"], ["y"], nodes, OPSETS)


def external(location: str, dims: Sequence[int] = (1,)) -> TensorProto:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", "0"), ("length", "4")):
        tensor.external_data.add(key=key, value=value)
    return tensor


def call(
    name: str, inputs: Sequence[str] = ("x",), outputs: Sequence[str] = ("y",), **attributes: int
) -> onnx.NodeProto:
    return helper.make_node(name, inputs, outputs, domain="ours", **attributes)


NEG = helper.make_node("Neg", ["x"], ["y"])
# Called in the order of their numbers, each has been counted when the next is.
CHAIN = [function(f"f{number}", [f"f{number + 1}"] if number < 59 else ["Neg"]) for number in range(60)]


def test_weights_of_every_graph_are_its_own_and_read_as_onnx_reads_them(bundle: Callable[..., Path]) -> None:
    found = read_bundle(bundle("gqa-112"))
    for graph in found.manifest.graphs:
        model = Model.of_bundle(found, graph)
        places = {f"weights/{graph}.bin"} if "/" not in graph else set()
        assert {weight.location for weight in model.weights} == places
        expected = {tensor.name: tensor for tensor in onnx.load(file_of(found, graph)).graph.initializer}
        for weight in model.weights:
            assert np.array_equal(model.weight(weight), numpy_helper.to_array(expected[weight.name]))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (model_of([endless_loop()]), "its node 'Loop' holds a graph"),
        (
            model_of([call("f")], [helper.make_function("ours", "f", ["x"], ["y"], [endless_loop()], OPSETS)]),
            "its node 'Loop' holds a graph",
        ),
        (model_of([call("f")], [function("f", ["f"])]), "more than 32 deep, or themselves"),
        (model_of([call("f")], [function("f", ["g"]), function("g", ["f"])]), "more than 32 deep, or themselves"),
        (
            model_of(
                [call("f0")],
                [function(f"f{number}", [f"f{number + 1}"] * 2) for number in range(24)] + [function("f24", ["Neg"])],
            ),
            "nodes, those of its functions counted at every call, expected at most 50000",
        ),
        (
            model_of([helper.make_node("Constant", [], ["y"], value=external("w.bin"))]),
            "reads a value that is no weight from a file",
        ),
        (model_of([call(f"f{number}") for number in range(60)], CHAIN), "more than 32 deep, or themselves"),
        (model_of([NEG], weights=[external("w.bin")] * 2), "two weights of one name"),
        (model_of([NEG], weights=[external("*/_ORT_MEM_ADDR_/*")]), "lies at"),
        (model_of([NEG], weights=[external("w.bin", [1] * 100)]), "of type 1"),
        (b"", "it has no graph"),
        (b"\x3a\xff\xff\xff\xff\x0f", "is no ONNX model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_might_never_end_or_reaches_out_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(BackendError, match=reason):
        checked_weights(data, "graph 'graph'")
    ends = model_of([call("f")], [function("f", ["g", "g"]), function("g", ["Neg", "Neg"])])
    assert checked_weights(ends, "graph 'graph'") == ()


def loaded(folder: Path, data: bytes, **files: bytes) -> Model:
    held = {}
    for name, content in {"graphs/graph.onnx": data, **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        held[name] = HeldFile(folder / name, BackendError)
    spec = GraphSpec("graphs/graph.onnx", (_tensor("x"),), (_tensor("y"),))
    return Model("graph", spec, spec.file, held, 0)


def _tensor(name: str) -> TensorSpec:
    return TensorSpec(name, "float32", ("n",))


def test_onnxruntimes_own_format_is_not_read(tmp_path: Path) -> None:
    # It would be loaded past what is checked of a file as ONNX.
    onnxruntime = import_onnxruntime("ort-cpu")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(tmp_path / "graph.ort")
    options.add_session_config_entry("session.save_model_format", "ORT")
    providers = ["CPUExecutionProvider"]
    onnxruntime.InferenceSession(model_of([NEG]), options, providers=providers)
    data = (tmp_path / "graph.ort").read_bytes()
    onnxruntime.InferenceSession(data, onnxruntime.SessionOptions(), providers=providers)
    with pytest.raises(Exception, match=r"(?i)protobuf|graph"):
        onnxruntime.InferenceSession(data, session_options(onnxruntime), providers=providers, enable_fallback=0)
    with pytest.raises(BackendError, match="is no ONNX model"):
        load_backend("ort-cpu").load(loaded(tmp_path, data))


@pytest.mark.parametrize("location", ["w.bin", "../w.bin", "a/../../../w.bin"])
def test_only_listed_files_are_read(location: str, tmp_path: Path) -> None:
    data = model_of([helper.make_node("Add", ["x", "w"], ["y"])], weights=[external(location)])
    for place in (tmp_path / "bundle" / "graphs", tmp_path / "bundle", tmp_path):
        place.mkdir(exist_ok=True, parents=True)
        (place / "w.bin").write_bytes(bytes(4))
    model = loaded(tmp_path / "bundle", data)
    with pytest.raises(BackendError, match=f"reads the file '{location}', which the manifest does not list"):
        load_backend("ort-cpu").load(model)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"inputs": (_tensor("z"),)}, r"has the inputs x float32\['n'\], the bundle says z"),
        ({"inputs": ()}, "the bundle says none"),
        ({"outputs": (TensorSpec("y", "float16", ("n",)),)}, "the bundle says y float16"),
        ({"outputs": (TensorSpec("y", "float32", ("n", 3)),)}, "the bundle says y float32"),
    ],
)
def test_what_a_graph_takes_and_gives_is_compared_with_the_manifest(
    changed: dict[str, tuple[TensorSpec, ...]], said: str, tmp_path: Path
) -> None:
    model = loaded(tmp_path, model_of([NEG]))
    load_backend("ort-cpu").load(model)
    spec = GraphSpec(**{"file": model.name, "inputs": model.spec.inputs, "outputs": model.spec.outputs, **changed})
    with pytest.raises(BackendError, match=said):
        load_backend("ort-cpu").load(Model("graph", spec, model.name, model.folder, 0))


def test_a_graph_that_fails_while_it_runs_is_an_error_with_the_shapes(tmp_path: Path) -> None:
    shape = helper.make_tensor("shape", TensorProto.INT64, [1], [7])
    backend = load_backend("ort-cpu")
    data = model_of([helper.make_node("Reshape", ["x", "shape"], ["y"])], weights=[shape])
    engine = backend.load(loaded(tmp_path, data))
    assert backend.numpy(engine({"x": backend.tensor(np.zeros(7, np.float32))})["y"]).shape == (7,)
    with pytest.raises(BackendError, match=r"graph 'graph' failed in onnxruntime on x \[8\]"):
        engine({"x": backend.tensor(np.zeros(8, np.float32))})


X = np.array([[3.0, -1.0, 2.0], [0.5, 4.0, -2.0]], np.float32)


def summed(name: str, *, default: int | None = None) -> onnx.FunctionProto:
    """Sums along the axis `along`, with or without a default."""
    node = helper.make_node("CumSum", ["v", "axis"], ["sum"])
    axis = helper.make_node("Constant", [], ["axis"])
    axis.attribute.add(name="value_int", ref_attr_name="along", type=onnx.AttributeProto.INT)
    given = {} if default is None else {"attribute_protos": [helper.make_attribute("along", default)]}
    named = ["along"] if default is None else []
    return helper.make_function("ours", name, ["v"], ["sum"], [axis, node], OPSETS, attributes=named, **given)


def inlinable(nodes: list[onnx.NodeProto]) -> bytes:
    """A model of the outputs of the last node. `Clipped` may lack its second bound, and calls two others."""
    inner = [
        helper.make_node("Clip", ["v", "low", "high"], ["inner"]),
        call("Rows", ["inner"], ["rows"]),
        call("Rows", ["rows"], ["twice"], along=0),
    ]
    clipped = helper.make_function("ours", "Clipped", ["v", "low", "high"], ["rows", "twice"], inner, OPSETS)
    given, made = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names if name]
        for names in (("x", "low", "high"), nodes[-1].output)
    )
    functions = [summed("Rows", default=1), summed("Along"), clipped]
    return model_of(nodes, functions, inputs=given, outputs=made)


def computed(data: bytes) -> list[np.ndarray]:
    ort = import_onnxruntime("ort-cpu")
    session = ort.InferenceSession(data, session_options(ort), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": X, "low": np.array(-1.5, np.float32), "high": np.array(2.5, np.float32)})


CALLS = {
    "an attribute": [call("Along", along=0)],
    "its default": [call("Rows")],
    "calls in calls": [call("Clipped", ["x", "low", "high"], ["y", "z"])],
    "an input left out at the end": [call("Clipped", ["x", "low"], ["y", "z"])],
    "an input left out before": [call("Clipped", ["x", "", "high"], ["y", "z"])],
    "an output left out": [call("Clipped", ["x", "low", "high"], ["", "z"])],
    "twice, and other nodes between": [
        call("Along", ["x"], ["inner"], along=1),
        helper.make_node("Neg", ["inner"], ["sum"]),
        call("Along", ["sum"], ["y"], along=0),
    ],
}


@pytest.mark.parametrize("calls", CALLS)
def test_an_inlined_graph_computes_what_it_did(calls: str) -> None:
    data = inlinable(CALLS[calls])
    without = inlined(data)
    assert not onnx.load_from_string(without).functions
    for found, expected in zip(computed(without), computed(data), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_inlined_graphs_of_a_bundle_are_valid_and_small_or_stay_as_they_are(bundle: Callable[..., Path]) -> None:
    opened = read_bundle(bundle("gqa-112"))
    sanitizers = [graph for graph in opened.manifest.graphs if graph.endswith("sanitizer")]
    assert sanitizers
    for graph in ("vision", *sanitizers):
        loaded = Model.of_bundle(opened, graph)
        without = inlined(loaded.onnx)
        assert graph != "vision" or without == loaded.onnx
        assert len(without) < 2 * len(loaded.onnx)
        found = onnx.load_from_string(without)
        assert {node.domain for node in found.graph.node} == {""}
        if graph != "vision":
            onnx.checker.check_model(found, full_check=True)
