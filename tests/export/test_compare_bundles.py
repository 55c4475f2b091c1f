"""`compare_bundles.py` finds nothing between equal bundles, and every kind of difference between others."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from compare_bundles import differences, main

SANITIZER = "sinkpruner/retain-64/sanitizer"
Graph = onnx.GraphProto


def another_operator(graph: Graph) -> None:
    next(node for node in graph.node if node.op_type == "Concat").op_type = "Add"


def another_constant(graph: Graph) -> None:
    tensor = next(tensor for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.INT64)
    tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor) + 1, tensor.name))


def test_each_change_is_found(
    bundle: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = Path(shutil.copytree(bundle("gqa-112"), tmp_path / "copied"))
    path = copied / "graphs" / f"{SANITIZER}.onnx"
    whole = path.read_bytes()
    for change, place in (
        (another_operator, ".op_type is 'Add', was 'Concat'"),
        (another_constant, "].raw_data is "),
    ):
        model = onnx.load_from_string(whole)
        change(model.graph)
        onnx.save(model, path)
        found = differences(bundle("gqa-112"), copied)
        assert list(found) == [SANITIZER] and place in found[SANITIZER][0]
    path.write_bytes(whole)
    weights = copied / "graphs/weights/head.bin"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert main([str(bundle("gqa-112")), str(copied)]) == 1
    first, summary = capsys.readouterr().out.splitlines()
    assert first.startswith("head: graph.initializer[") and summary.endswith("1 parts differ")
