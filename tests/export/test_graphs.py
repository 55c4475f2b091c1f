"""The graphs are small and native."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnx

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


def test_every_graph_passes_the_checker_and_every_input_is_used(bundle: Bundles) -> None:
    for precision in ("fp32", "fp16"):
        for path in (bundle("gqa-112", precision, ("retain-64",)) / "graphs").rglob("*.onnx"):
            onnx.checker.check_model(path, full_check=True)
            graph = onnx.load(path, load_external_data=False).graph
            used = {name for node in graph.node for name in node.input}
            assert {value.name for value in graph.input} <= used, path


def test_weights_are_on_disk_once(bundle: Bundles, checkpoint: Callable[[str], Path]) -> None:
    root = bundle("mha-336")
    held = sum(path.stat().st_size for path in (root / "graphs/weights").iterdir())
    held += (root / "weights/embedding.safetensors").stat().st_size
    assert held < 1.05 * (checkpoint("mha-336") / "model.safetensors").stat().st_size
