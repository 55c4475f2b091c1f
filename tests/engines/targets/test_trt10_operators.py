"""TensorRT 10.3 has the operators of every `opset20` graph, by its list."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import onnx.parser
import pytest

from sinkprune.contract.bundle import Bundle
from support.models.chosen_heads import every_method
from support.models.heads_of_64 import (
    CONFIG,
    INTERNVL_CONFIG,
    NEXT_CONFIG,
    OFT_CONFIG,
    OPENVLA_CONFIG,
    PALIGEMMA_CONFIG,
    PI0_CONFIG,
    PI05_CONFIG,
    QWEN2_CONFIG,
    QWEN3_CONFIG,
    QWEN_CONFIG,
    export_random,
)
from support.models.manifests import file_of
from support.references.trt10_operators import MAX_OPSET, fault

# Deep enough for every method.
DEEP = {**CONFIG, "text_config": {**CONFIG["text_config"], "num_hidden_layers": 8}}
INT4_GRAPHS = {"projector", "decoder_0", "decoder_1", "decoder_2", "decoder_3", "head"}
SANITIZER = "sinkpruner/retain-64+raster+visual-keys+compact/sanitizer"
Graphs = dict[str, onnx.ModelProto]
Export = Callable[[str, str], Graphs]


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Return a function that exports every graph of every method, with all options that add operators."""

    @cache
    def get(dialect: str, precision: str) -> Graphs:
        budgets = ("retain-192", "retain-64+raster+visual-keys+compact")
        folder = tmp_path_factory.mktemp(f"{dialect}-{precision}")
        options = {"budgets": budgets, "precision": precision, "dialect": dialect, **every_method(DEEP)}
        return graphs_of(export_random(folder, DEEP, **options))

    return get


def graphs_of(bundle: Bundle) -> Graphs:
    return {name: onnx.load(file_of(bundle, name), load_external_data=False) for name in bundle.manifest.graphs}


def small(body: str, opset: int = MAX_OPSET, ir_version: int = 10) -> onnx.ModelProto:
    """Parse a model in ONNX's text format. `body` is the graph after its name."""
    header = f'<ir_version: {ir_version}, opset_import: ["" : {opset}, "other" : 1]>'
    return onnx.parser.parse_model(f"{header} small {body}")


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "fp16"])
def test_every_opset20_graph_of_every_method_passes(precision: str, export: Export) -> None:
    graphs = export("opset20", precision)
    assert len(graphs) > 50
    for name, model in graphs.items():
        assert not fault(model), name


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_every_opset20_graph_with_quantised_weights_passes(weights: str, tmp_path: Path) -> None:
    options = {"budgets": ("retain-64",), "precision": "fp16", "dialect": "opset20", "weights": weights}
    for name, model in graphs_of(export_random(tmp_path, **options)).items():
        assert not fault(model), name
        (opset,) = [opset.version for opset in model.opset_import if not opset.domain]
        # Only INT4 needs the next opset.
        assert opset == (21 if weights == "int4" and name in INT4_GRAPHS else 20)


def test_opset24_is_not_on_the_list(export: Export) -> None:
    graphs = export("opset24", "fp16")
    for name, said in (("vision", "Attention"), ("head", "RMSNormalization"), (SANITIZER, "opset 24")):
        assert said in fault(graphs[name])


def test_functions_are_checked(export: Export) -> None:
    model = deepcopy(export("opset20", "fp16")[SANITIZER])
    body = next(function for function in model.functions if function.name == "DiversitySelect")
    body.node.append(onnx.helper.make_node("Cast", ["count"], ["wide"], "Widen", to=onnx.TensorProto.DOUBLE))
    assert "DiversitySelect/Widen" in fault(model) and "DOUBLE" in fault(model)
    body.node[-1].op_type = "NonZero"
    assert fault(model) == "DiversitySelect/Widen: NonZero is not on the list"


# Each row: a graph that is rejected, the reason, and a similar graph that passes.
NEIGHBOURS = {
    "CumSum of integers": (
        "(int64[4] x) => (int64[4] y) <int64 axis = {0}> { y = CumSum(x, axis) }",
        "CumSum is given INT64",
        "(float[4] x) => (float[4] y) <int64 axis = {0}> { y = CumSum(x, axis) }",
    ),
    "CumSum along a computed axis": (
        "(float[4] x, int64 axis) => (float[4] y) { y = CumSum(x, axis) }",
        "CumSum computes its input 1",
        "(float[4] x) => (float[4] y) { axis = Constant<value_int = 0>() y = CumSum(x, axis) }",
    ),
    "doubles": (
        "(double[4] x) => (double[4] y) { y = Abs(x) }",
        "Abs reads or writes 'x', DOUBLE",
        "(float[4] x) => (float[4] y) { y = Abs(x) }",
    ),
    "a scatter that adds": (
        '(float[4] x, int64[2] i, float[2] u) => (float[4] y) { y = ScatterElements<reduction = "add">(x, i, u) }',
        "ScatterElements has reduction = b'add'",
        '(float[4] x, int64[2] i, float[2] u) => (float[4] y) { y = ScatterElements<reduction = "none">(x, i, u) }',
    ),
    "axes that are computed": (
        "(float[2,3] x, int64[1] a) => (float[2,1] y) { y = ReduceMax(x, a) }",
        "ReduceMax computes its input 1",
        "(float[2,3] x) => (float[2,1] y) <int64[1] a = {1}> { y = ReduceMax(x, a) }",
    ),
    "a TopK beyond its limit": (
        "(float[N] x) => (float[M] v, int64[M] i) { k = Constant<value_ints = [3841]>() v, i = TopK(x, k) }",
        "TopK has K above 3840",
        "(float[N] x, int64[1] k) => (float[M] v, int64[M] i) { v, i = TopK(x, k) }",
    ),
    "the mean of a LayerNormalization": (
        "(float[2,4] x, float[4] w) => (float[2,4] y, float[2,1] m) { y, m = LayerNormalization(x, w) }",
        "LayerNormalization gives 2 outputs",
        "(float[2,4] x, float[4] w) => (float[2,4] y) { y = LayerNormalization(x, w) }",
    ),
    "a zero point": (
        "(float[4] x) => (float[4] y) <int8[4] c = {1, 2, 3, 4}, float s = {0.5}, int8 z = {0}> "
        "{ w = DequantizeLinear(c, s, z) y = Add(x, w) }",
        "DequantizeLinear has a zero point",
        "(float[4] x) => (float[4] y) <int8[4] c = {1, 2, 3, 4}, float s = {0.5}> "
        "{ w = DequantizeLinear(c, s) y = Add(x, w) }",
    ),
}


@pytest.mark.parametrize("case", NEIGHBOURS)
def test_what_is_off_the_list_is_refused_and_its_neighbour_is_not(case: str) -> None:
    refused, why, accepted = NEIGHBOURS[case]
    assert why in fault(small(refused))
    assert not fault(small(accepted))


LLAVA = ("retain-64", "retain-32+visual-keys+compact")
NEXT = ("retain-320", "retain-160+raster+visual-keys+compact")
QWEN = ("prune-66.7", "prune-88.9+raster+visual-keys")
CLIPS = ("prune-80", "prune-80+per-frame")
PIXELS = {"max_pixels": 376320}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llava, several images": (CONFIG, {"budgets": LLAVA, "max_images": 2}),
    "llava-next": (NEXT_CONFIG, {"budgets": NEXT}),
    "llava-next, several images": (NEXT_CONFIG, {"budgets": NEXT, "max_images": 2}),
    "internvl": (INTERNVL_CONFIG, {"budgets": QWEN, "max_frames": 8}),
    "qwen2.5-vl": (QWEN_CONFIG, {"budgets": QWEN, **PIXELS}),
    "qwen2.5-vl, several images": (QWEN_CONFIG, {"budgets": QWEN, "max_images": 2, **PIXELS}),
    "qwen2.5-vl, video": (QWEN_CONFIG, {"budgets": CLIPS, "max_frames": 8, **PIXELS}),
    "qwen2-vl, video": (QWEN2_CONFIG, {"budgets": CLIPS, "max_frames": 8, **PIXELS}),
    "qwen3-vl, every method": (
        QWEN3_CONFIG,
        {"budgets": ("prune-66.7", "prune-66.7+raster"), "max_frames": 8, **PIXELS, **every_method(QWEN3_CONFIG)},
    ),
    "paligemma": (PALIGEMMA_CONFIG, {"budgets": QWEN}),
    "pi0, several cameras": (PI0_CONFIG, {"budgets": QWEN, "max_images": 2}),
    "pi0, one camera": (PI0_CONFIG, {"budgets": QWEN}),
    "pi0.5": (PI05_CONFIG, {"budgets": QWEN[:1]}),
    "openvla": (OPENVLA_CONFIG, {"budgets": QWEN[:1]}),
    "openvla-oft": (OFT_CONFIG, {"budgets": QWEN[1:], "max_images": 2}),
    "qwen3-vl, video, several images": (QWEN3_CONFIG, {"budgets": CLIPS, "max_frames": 8, "max_images": 2, **PIXELS}),
}
# The kinds with several images and with clips have all operators of these.
ALIKE = {"llava-next", "qwen2.5-vl", "qwen2.5-vl, several images", "pi0, one camera"}


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "fp16"])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind in ALIKE else []) for kind in KINDS]
)
def test_every_graph_is_on_the_list_of_10_3(kind: str, precision: str, tmp_path: Path) -> None:
    config, options = KINDS[kind]
    root = export_random(tmp_path, config, precision=precision, dialect="opset20", **options).path
    for path in (root / "graphs").rglob("*.onnx"):
        onnx.checker.check_model(path, full_check=True)
        model = onnx.load(path, load_external_data=False)
        assert not fault(model), path
        used = {name for node in model.graph.node for name in node.input}
        assert {value.name for value in model.graph.input} <= used, path
