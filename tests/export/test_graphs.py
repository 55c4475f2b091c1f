"""The graphs are small and native, and bundles whose graphs or weights differ are found."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from compare_bundles import differences, main

Bundles = Callable[..., Path]


def test_a_decoder_layer_is_a_few_native_operators(bundle: Bundles) -> None:
    graph, layers = onnx.load(bundle("mha-336") / "graphs/decoder_2.onnx", load_external_data=False).graph, 2
    operators = Counter(node.op_type for node in graph.node)
    # With a scale of its own onnxruntime packs all keys anew for every token.
    attentions = [node for node in graph.node if node.op_type == "Attention"]
    assert [(fact.name, fact.f) for node in attentions for fact in node.attribute] == [("scale", 1.0)] * layers
    assert operators["MatMul"] == 5 * layers and operators["TensorScatter"] == 2 * layers
    assert operators["RotaryEmbedding"] == layers
    mask = 14
    assert len(graph.node) <= 25 * layers + mask


def test_plan_graphs_hold_no_weights_and_call_the_two_custom_operations(bundle: Bundles) -> None:
    root = bundle("mha-336")
    for path in (root / "graphs/sinkpruner").rglob("*.onnx"):
        assert path.stat().st_size < 30_000
        model = onnx.load(path)
        custom = [node.op_type for node in model.graph.node if node.domain == "sinkprune"]
        assert custom == (["TopRho", "DiversitySelect"] if path.name == "sanitizer.onnx" else [])
        assert {function.name for function in model.functions} == set(custom)


def test_weights_are_on_disk_once(bundle: Bundles, checkpoint: Callable[[str], Path]) -> None:
    root = bundle("mha-336")
    held = sum(path.stat().st_size for path in (root / "graphs/weights").iterdir())
    held += (root / "weights/embedding.safetensors").stat().st_size
    assert held < 1.05 * (checkpoint("mha-336") / "model.safetensors").stat().st_size


def test_each_change_is_found(bundle: Bundles, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `compare_bundles.py` prints of two bundles."""
    sanitizer, copied = (
        "sinkpruner/retain-64/sanitizer",
        Path(shutil.copytree(bundle("gqa-112"), tmp_path / "copied")),
    )
    path = copied / "graphs" / f"{sanitizer}.onnx"
    model = onnx.load(path)
    next(node for node in model.graph.node if node.op_type == "Concat").op_type = "Add"
    onnx.save(model, path)
    found = differences(bundle("gqa-112"), copied)
    assert list(found) == [sanitizer] and ".op_type is 'Add', was 'Concat'" in found[sanitizer][0]
    shutil.copy(bundle("gqa-112") / "graphs" / f"{sanitizer}.onnx", path)
    weights = copied / "graphs/weights/head.bin"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert main([str(bundle("gqa-112")), str(copied)]) == 1
    first, summary = capsys.readouterr().out.splitlines()
    assert first.startswith("head: graph.initializer[") and summary.endswith("1 parts differ")
