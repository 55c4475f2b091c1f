"""The graphs are small, native, and have exactly the interface of the contract."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from sinkprune.contract.bundle import read_bundle

Bundles = Callable[..., Path]
D, H, HKV, HEAD = 64, 4, 2, 16

SELECT = {
    "hidden": ("float", (1, "S", D)),
    "cos": ("float", (1, "S", HEAD // 2)),
    "sin": ("float", (1, "S", HEAD // 2)),
    "query": ("float", (1, H, "S", HEAD)),
    "key": ("float", (1, HKV, "S", HEAD)),
    "visual_index": ("int64", ("V",)),
    "text_index": ("int64", ("L",)),
}
SELECT_OUT = {
    "hidden_out": ("float", (1, "S2", D)),
    "cos_out": ("float", (1, "S2", HEAD // 2)),
    "sin_out": ("float", (1, "S2", HEAD // 2)),
    "visual_index_out": ("int64", ("V2",)),
    "text_index_out": ("int64", ("L",)),
    "keep_index": ("int64", ("S2",)),
}


def load(root: Path, graph: str) -> onnx.ModelProto:
    return onnx.load(root / "graphs" / f"{graph}.onnx", load_external_data=False)


@pytest.mark.parametrize(("dialect", "cache"), [("opset24", "in-place"), ("opset20", "rows")])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_interfaces_are_the_contract(precision: str, dialect: str, cache: str, bundle: Bundles) -> None:
    manifest = read_bundle(bundle("gqa-112", precision, ("retain-64",), dialect)).manifest
    assert manifest.cache == cache
    real = {"fp32": "float32", "fp16": "float16"}[precision]
    assert manifest.cut_after == (1, 4)
    expected: dict[str, tuple[dict, dict]] = {
        "vision": (
            {"pixel_values": ("float", ("G", 3, 112, 112))},
            {"tokens": ("float", ("G", 64, 64)), "norms": ("float32", ("G", 64)), "salience": ("float32", ("G", 64))},
        ),
        "projector": ({"tokens": ("float", ("G", "n", 64))}, {"embeddings": ("float", ("G", "n", D))}),
        "head": ({"hidden": ("float", (1, "S", D))}, {"logits": ("float", (1, 384))}),
        "sinkpruner/retain-64/sanitizer": (
            {"tokens": ("float", ("G", 64, 64)), "norms": ("float32", ("G", 64)), "salience": ("float32", ("G", 64))},
            {"kept_tokens": ("float", ("G", 15, 64)), "kept_index": ("int64", ("G", 15))},
        ),
    }
    expected["sinkpruner/retain-64/select_after_1"] = (SELECT, SELECT_OUT)
    for segment, layers in enumerate([range(2), range(2, 5), range(5, 8)]):
        inputs = {name: SELECT[name] for name in ("hidden", "cos", "sin")}
        outputs = {"hidden_out": ("float", (1, "S", D))}
        inputs["past_length"] = ("int64", (1,))
        for layer in layers:
            for part in ("key", "value"):
                inputs[f"past_{part}_{layer}"] = ("float", (1, HKV, "C", HEAD))
                outputs[f"{part}_{layer}"] = ("float", (1, HKV, {"in-place": "C", "rows": "S"}[cache], HEAD))
        if segment < 2:
            outputs |= {name: SELECT[name] for name in ("query", "key")}
        expected[f"decoder_{segment}"] = (inputs, outputs)
    assert set(manifest.graphs) == set(expected)
    for name, (inputs, outputs) in expected.items():
        spec = manifest.graphs[name]
        for found, wanted in ((spec.inputs, inputs), (spec.outputs, outputs)):
            resolved = {key: (real if kind == "float" else kind, shape) for key, (kind, shape) in wanted.items()}
            assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in found} == resolved, name


def test_a_decoder_layer_is_a_few_native_operators(bundle: Bundles) -> None:
    graph, layers = load(bundle("mha-336"), "decoder_2").graph, 2
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


def test_weights_are_on_disk_once(bundle: Bundles) -> None:
    root = bundle("mha-336")
    vision = 3 * (4 * (64 * 64 + 64) + 2 * 64 * 128 + 128 + 64 + 4 * 64) + 64 * (3 * 14 * 14 + 577 + 1 + 2)
    projector = 2 * (64 * 64 + 64)
    decoder = 6 * (4 * 64 * 64 + 3 * 64 * 160 + 2 * 64)
    head_and_table = 2 * 384 * 64 + 64
    weights = 4 * (vision + projector + decoder + head_and_table)
    held = sum(path.stat().st_size for path in (root / "graphs/weights").iterdir())
    held += (root / "weights/embedding.safetensors").stat().st_size
    assert weights <= held < 1.1 * weights
