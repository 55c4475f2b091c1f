"""Linear layers of the same inputs as one product, with the weights and outputs that each has alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from sinkprune.contract.precision import Array, WeightsName
from sinkprune.export.dialects import load_dialect
from sinkprune.export.graph import ReadTensor, WeightedGraph
from sinkprune.export.weights import PRECISIONS, form_of

INPUTS, WIDTHS = 64, {"q": 10, "k": 6, "v": 3}
FORMS: list[WeightsName] = ["fp32", "bf16", "int8", "int4", "uint4"]


def tensor(name: str, shape: Sequence[int]) -> Array:
    """The checkpoint's tensor of that name; its values' size depends on the name."""
    generator = np.random.default_rng(ord(name[0]))
    return (generator.standard_normal(shape) * ord(name[0]) ** 2).astype(np.float32)


def written(folder: Path, form: WeightsName, *, bias: bool, joined: bool, read: ReadTensor = tensor) -> Path:
    """A graph that gives `q`, `k` and `v` of `x` beside each other, from one product or from three."""
    graph = WeightedGraph("layers", PRECISIONS["fp32"], load_dialect("opset24"), form_of(form, 32), read)
    x = graph.input("x", [1, "S", INPUTS])
    if joined:
        y = graph.joined(x, "qkv", WIDTHS, INPUTS, bias=bias)
    else:
        parts = [graph.linear(x, name, INPUTS, width, bias=bias) for name, width in WIDTHS.items()]
        y = graph.op.Concat(*parts, axis=-1)
    graph.output("y", y, [1, "S", sum(WIDTHS.values())])
    graph.save(folder, "layers.onnx")
    return folder / "layers.onnx"


def weights(path: Path) -> dict[str, Array]:
    """What lies in the file beside the graph, by name."""
    found = onnx.load(path).graph.initializer
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in found if tensor.name[0] in "qkv"}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_each_has_the_weights_and_outputs_that_it_has_alone(form: WeightsName, bias: bool, tmp_path: Path) -> None:
    paths = {joined: written(tmp_path / str(joined), form, bias=bias, joined=joined) for joined in (True, False)}
    joint, alone = weights(paths[True]), weights(paths[False])
    assert len(joint) * len(WIDTHS) == len(alone)
    for name, array in joint.items():
        parts = [alone[name.replace("qkv", which)] for which in WIDTHS]
        assert array.dtype == parts[0].dtype
        np.testing.assert_array_equal(array, np.concatenate(parts, axis=-1), err_msg=name)
    x = np.random.default_rng(0).standard_normal((1, 5, INPUTS), np.float32)
    found = []
    for joined, path in paths.items():
        operators = Counter(node.op_type for node in onnx.load(path).graph.node)
        assert operators["MatMul"] == (1 if joined else 3)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        found.append(session.run(["y"], {"x": x})[0])
    together, apart = found
    assert together.shape == (1, 5, sum(WIDTHS.values()))
    for first, last in pairwise(accumulate(WIDTHS.values(), initial=0)):
        expected = apart[..., first:last]
        np.testing.assert_allclose(together[..., first:last], expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
