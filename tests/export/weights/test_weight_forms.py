"""The forms of weights: codes and scales against a slow reference, graphs against dequantised weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from onnx import numpy_helper
from safetensors.numpy import load_file, save_file

from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.precision import Array
from sinkprune.export.precision import PRECISIONS
from sinkprune.export.presets import PRESETS
from sinkprune.export.weights.rounding import packed, rounded
from sinkprune.export.weights.weight_forms import chosen_forms
from support.programs.commands import assert_refused, run

FLOATS = st.floats(-1e4, 1e4, width=32)
EXTREME = st.floats(width=32, allow_nan=False, allow_infinity=False)


def slowly_rounded(weight: Array, most: int, block: int, dtype: Any) -> tuple[Array, Array]:
    """Codes and scales, value by value."""
    outputs, inputs = weight.shape
    codes, scales = np.zeros((outputs, inputs), int), np.zeros((outputs, inputs // block), dtype)
    for o in range(outputs):
        for b in range(inputs // block):
            values = weight[o, b * block : (b + 1) * block].astype(np.float32)
            limits = np.finfo(dtype)
            scale = min(max(np.float32(max(abs(values)) / np.float32(most)), limits.tiny), limits.max)
            scales[o, b] = scale
            for i, value in enumerate(values):
                code = round(float(np.float32(value / np.float32(scales[o, b]))))
                codes[o, b * block + i] = min(max(code, -most), most)
    return codes, scales


@given(
    st.data(),
    st.sampled_from([(127, 8), (7, 8), (7, 4)]),
    st.sampled_from([np.float32, np.float16]),
    st.sampled_from([FLOATS, EXTREME, st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5])]),
)
def test_codes_and_scales_are_the_references(
    data: st.DataObject, kind: tuple[int, int], dtype: Any, values: st.SearchStrategy[float]
) -> None:
    most, block = kind
    weight = data.draw(arrays.arrays(np.float32, (3, 8), elements=values))
    found = rounded(weight, most, block, np.dtype(dtype))
    codes, scales = slowly_rounded(weight, most, block, dtype)
    np.testing.assert_array_equal(found.codes, codes)
    np.testing.assert_array_equal(found.scales, scales)
    assert found.scales.dtype == dtype and (found.scales > 0).all() and np.isfinite(found.scales).all()


@given(arrays.arrays(np.float32, (2, 64), elements=FLOATS))
def test_no_value_is_further_off_than_half_a_step(weight: Array) -> None:
    codes, scales = rounded(weight, 7, 32, np.dtype(np.float32))
    steps = np.repeat(scales, 32, axis=1)
    assert (np.abs(codes * steps - weight) <= 0.5 * steps * (1 + 1e-5)).all()


def test_many_rows_are_rounded_as_few_are() -> None:
    weight = np.random.default_rng(1).standard_normal((2000, 192), np.float32)
    codes, scales = rounded(weight, 127, 192, np.dtype(np.float32))
    for row in (0, 681, 682, 683, 1999):
        alone = rounded(weight[row : row + 1], 127, 192, np.dtype(np.float32))
        np.testing.assert_array_equal(codes[row], alone.codes[0])
        np.testing.assert_array_equal(scales[row], alone.scales[0])


@given(arrays.arrays(np.int8, st.integers(1, 9), elements=st.integers(-8, 7)))
def test_packed_codes_are_onnx_int4(codes: Array) -> None:
    tensor = onnx.TensorProto(data_type=onnx.TensorProto.INT4, dims=codes.shape, raw_data=packed(codes).tobytes())
    np.testing.assert_array_equal(numpy_helper.to_array(tensor).astype(np.int8), codes)


def dequantised(path: Path) -> dict[str, tuple[Array, int]]:
    """Every matrix of a graph's file [inputs,outputs], from its codes and scales alone, and how many inputs share a
    scale; by its tensor's name."""
    model = onnx.load(path)
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    found = {}
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear":
            codes, scales = values[node.input[0]].astype(np.float32), values[node.input[1]].astype(np.float32)
            attributes = {attribute.name: attribute.i for attribute in node.attribute}
            if "block_size" in attributes:
                assert attributes["axis"] == 0
                scales = np.repeat(scales, attributes["block_size"], axis=0)
            else:
                assert attributes["axis"] == 1 and scales.shape == codes.shape[1:]
            found[node.input[0]] = codes * scales, attributes.get("block_size", len(codes))
    return found


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_graph_holds_each_matrix_rounded(weights: str, precision: str, bundle: Callable[..., Path]) -> None:
    plain, small = (bundle("gqa-112", "fp32"), bundle("gqa-112", precision, weights=weights))
    forms = read_bundle(small).manifest.weights
    assert (forms.decoder, forms.vision, forms.block_size) == (weights, "int8", 128 if weights == "int4" else None)
    for graph in ("vision", "projector", "decoder_0", "decoder_3", "head"):
        original = onnx.load(plain / f"graphs/{graph}.onnx")
        exact = {tensor.name: numpy_helper.to_array(tensor) for tensor in original.graph.initializer}
        multiplied = {node.input[1] for node in original.graph.node if node.op_type == "MatMul"} & exact.keys()
        matrices = dequantised(small / f"graphs/{graph}.onnx")
        assert matrices.keys() == multiplied
        int4 = weights == "int4" and graph != "vision"
        for name, (matrix, size) in matrices.items():
            assert size == (64 if len(matrix) == 64 else 32) if int4 else size == len(matrix)
            blocks = np.abs(exact[name]).reshape(-1, size, matrix.shape[1]).max(axis=1)
            step = np.repeat(blocks / (7 if int4 else 127), size, axis=0)
            assert (np.abs(matrix - exact[name]) <= step * (0.51 if precision == "fp32" else 0.6) + 1e-6).all(), name
            assert np.abs(matrix - exact[name]).max() > 0


def run_graph(model: onnx.ModelProto, folder: Path, accuracy_level: int, inputs: dict[str, Array]) -> list[Array]:
    """Its outputs in ONNX Runtime, which rounds states too at accuracy level 4, and does not at 1."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", str(accuracy_level))
    onnx.save(model, folder / "graph.onnx")
    session = onnxruntime.InferenceSession(folder / "graph.onnx", options, providers=["CPUExecutionProvider"])
    found: list[Array] = session.run(None, inputs)
    return found


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("graph", ["projector", "head"])
def test_onnx_runtime_computes_with_the_dequantised_weights(
    weights: str, graph: str, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    path = bundle("gqa-112", weights=weights) / f"graphs/{graph}.onnx"
    quantised, floats = onnx.load(path), onnx.load(path)
    matrices = dequantised(path)
    nodes = [node for node in floats.graph.node if node.op_type == "DequantizeLinear"]
    for node in nodes:
        floats.graph.initializer.append(numpy_helper.from_array(matrices[node.input[0]][0], node.output[0]))
        floats.graph.node.remove(node)
    name, width = floats.graph.input[0].name, floats.graph.input[0].type.tensor_type.shape.dim[2].dim_value
    states = np.random.default_rng(3).standard_normal((1, 7, width), np.float32)
    (expected,) = run_graph(floats, tmp_path, 1, {name: states})
    (exact,) = run_graph(quantised, tmp_path, 1, {name: states})
    (fast,) = run_graph(quantised, tmp_path, 4, {name: states})
    np.testing.assert_allclose(exact, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    assert 0 < np.linalg.norm(fast - expected) < 0.02 * np.linalg.norm(expected)


@pytest.mark.parametrize("weights", ["fp16", "bf16"])
def test_floats_of_another_type_are_cast_in_the_graph(weights: str, bundle: Callable[..., Path]) -> None:
    path = bundle("gqa-112", weights=weights) / "graphs/decoder_0.onnx"
    exact = {
        t.name: numpy_helper.to_array(t)
        for t in onnx.load(bundle("gqa-112") / "graphs/decoder_0.onnx").graph.initializer
    }
    stored = {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    name, dtype = (
        "language_model.layers.0.mlp.up_proj.weight",
        {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}[weights],
    )
    assert stored[name].dtype == dtype
    np.testing.assert_array_equal(stored[name], exact[name].astype(dtype))
    norm = "language_model.layers.0.input_layernorm.weight"
    assert stored[norm].dtype == np.float32


def test_the_tower_may_have_a_form_of_its_own() -> None:
    fp32, fp16 = PRECISIONS["fp32"], PRECISIONS["fp16"]
    assert chosen_forms(fp32, None, None, None).name == "fp32"
    assert chosen_forms(fp16, "int4", None, None).name == "int4, vision int8"
    assert chosen_forms(fp16, "int4", "fp16", 128).block_size == 128
    assert chosen_forms(fp32, "bf16", None, None).name == "bf16"
    assert chosen_forms(fp32, "int8", None, None).block_size is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--precision", "fp16", "--weights", "fp32"], "--weights is fp32, but states are fp16."),
        (["--precision", "fp16", "--vision-weights", "fp32"], "--vision-weights is fp32, but states are fp16."),
        (["--weights", "int8", "--block-size", "64"], "--block-size is 64, but no weights are int4."),
    ],
)
def test_forms_that_do_not_fit_are_refused(
    options: list[str], said: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    done = run("sinkprune-export", checkpoint("gqa-112"), "-o", tmp_path / "out", *options)
    assert_refused(done, said)
    assert not (tmp_path / "out").exists()


def test_blocks_are_as_large_as_asked_and_as_divide_the_inputs(tmp_path: Path) -> None:
    config = json.loads(json.dumps(PRESETS["llava-1.1b"]))
    config["vision_config"] |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    config["vision_config"] |= {"num_attention_heads": 4}
    config["text_config"] |= {
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 5,
        "vocab_size": 32064,
    }
    config["text_config"] |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    export = partial(
        run, "sinkprune-export", tmp_path, "--random-weights", "--budgets", "retain-64", "--weights", "int4"
    )
    for asked, found in (([], {128, 64}), (["--block-size", 64], {64}), (["--block-size", 32], {32})):
        output = tmp_path / f"out-{len(found)}-{max(found)}"
        assert export("-o", output, *asked).code == 0
        nodes = onnx.load(output / "graphs/decoder_0.onnx", load_external_data=False).graph.node
        blocks = {a.i for node in nodes for a in node.attribute if a.name == "block_size"}
        assert blocks == found
    config["text_config"]["intermediate_size"] = 200
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_refused(
        export("-o", tmp_path / "odd"),
        "'language_model.layers.0.mlp.down_proj.weight' has 200 inputs, expected a multiple of 32",
        "Export with --weights int8",
    )
    assert not (tmp_path / "odd").exists()


def test_a_value_that_fp16_cannot_hold_is_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("gqa-112"), tmp_path / "checkpoint"))
    tensors = load_file(folder / "model.safetensors")
    stored = next(stored for stored in tensors if stored.endswith("down_proj.weight"))
    tensors[stored][0, 0] = 7e4
    save_file(tensors, folder / "model.safetensors")
    for weights, code in (("fp16", 2), ("bf16", 0), ("int8", 0)):
        done = run("sinkprune-export", folder, "-o", tmp_path / weights, "--weights", weights)
        assert done.code == code, done.stderr
    tensors[stored][0, 0] = np.nan
    save_file(tensors, folder / "model.safetensors")
    assert_refused(
        run("sinkprune-export", folder, "-o", tmp_path / "nan", "--weights", "int8"), "holds NaN or infinity"
    )
