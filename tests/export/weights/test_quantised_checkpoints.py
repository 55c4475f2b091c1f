"""GPTQ and AWQ checkpoints answer as their own dequantised weights do, rounded twice only where they must be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from sinkprune import Pipeline
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.precision import Array
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from sinkprune.export.weights.quantised_weights import Requantised
from support.models.quantised_checkpoints import Layout, Made
from support.models.stored_matrices import stored_matrices
from support.programs.commands import assert_refused, run, succeed
from support.programs.slow_cases import every, slow_except
from support.references.picture_prompts import reference_inputs
from support.references.steps import QUESTION, ask
from support.references.transformers_runs import greedy_answer

MakeQuantised = Callable[..., Made]
NEW_TOKENS = 4
GPTQ, AWQ = Layout(), Layout("awq")
REORDERED, ASYMMETRIC = Layout(desc_act=True), Layout(sym=False, version_2=True)
EIGHT, EIGHT_ASYMMETRIC = Layout(bits=8), Layout(bits=8, sym=False)
ONE_ORDER, MIXED = Layout(desc_act=True, one_order=True), Layout("awq", kept="v_proj")
ONE_GROUP, EIGHT_ONE_GROUP = Layout(group_size=-1), Layout(bits=8, group_size=-1)
FORMS = {
    GPTQ: ("int4", 32),
    REORDERED: ("int4", 32),
    ONE_ORDER: ("int4", 32),
    ONE_GROUP: ("int4", 128),
    AWQ: ("uint4", 32),
    MIXED: ("uint4", 32),
    Layout(sym=False): ("uint4", 32),
    ASYMMETRIC: ("uint4", 32),
    Layout(sym=False, desc_act=True): ("uint4", 32),
    EIGHT: ("int8", 32),
    EIGHT_ONE_GROUP: ("int8", None),
}
"""What is repacked, and to which form and blocks."""


@pytest.fixture(scope="module")
def repacked(quantised: MakeQuantised, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The bundle of such a checkpoint, of which nothing was rounded again."""
    found: dict[tuple[str, Layout], Path] = {}

    def get(layout: Layout, name: str = "gqa-112") -> Path:
        if (name, layout) not in found:
            again: list[Requantised] = []
            output = tmp_path_factory.mktemp("bundles") / "bundle"
            budget = "retain-64" if name == "gqa-112" else "prune-77.8"
            request = ExportRequest(str(quantised(layout, name).folder), budgets=(budget,))
            export_bundle(request, output, requantised=again.append)
            assert again == []
            found[name, layout] = output
        return found[name, layout]

    return get


def exact(bundle: Path) -> Pipeline:
    """Load with products of floats. By default, ONNX Runtime rounds states too."""
    return Pipeline.load(bundle, compute="fp32")


def transformers_logits(name: str, folder: Path, photo: Image.Image) -> Array:
    """[NEW_TOKENS,vocab] of a greedy answer."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    found = greedy_answer(model, reference_inputs(name, folder, [photo], QUESTION), NEW_TOKENS)
    logits: Array = torch.stack(found.logits)[:, 0].numpy()
    return logits


@pytest.mark.parametrize(
    ("name", "layout"),
    # The matrices of every layout are compared one by one below.
    slow_except(
        {("gqa-112", REORDERED), ("qwen", AWQ)},
        [*(("gqa-112", layout) for layout in FORMS), ("qwen", AWQ), ("qwen", REORDERED)],
    ),
)
def test_it_answers_as_its_dequantised_weights_do(
    name: str, layout: Layout, quantised: MakeQuantised, repacked: Callable[..., Path], photo: Image.Image
) -> None:
    image = photo.resize((300, 200))
    _, logits = ask(exact(repacked(layout, name)), image, "none", NEW_TOKENS)
    expected = transformers_logits(name, quantised(layout, name).floats, image)
    assert np.abs(logits - expected).max() < 1e-3
    # The tower, the head and all else are as they were; the logits of the original are far off.
    original = transformers_logits(name, quantised(layout, name).original, image)
    assert np.abs(original[0] - expected[0]).max() > 5e-3


def decoder_matrices(root: Path, made: Made) -> dict[str, Array]:
    """Return the matrices of a bundle's decoder by their names in the checkpoint; joined ones are split."""
    found: dict[str, Array] = {}
    for path in (root / "graphs").glob("decoder_*.onnx"):
        for name, (matrix, _) in stored_matrices(path).items():
            parts = [name.replace("qkv", which) for which in "qkv"] if "qkv_proj" in name else [name]
            stored = [next(one for one in made.layers if canonical(one) == part) for part in parts]
            widths = [len(made.layers[one].matrix) for one in stored]
            found |= zip(stored, np.split(matrix, np.cumsum(widths)[:-1], axis=1), strict=True)
    return found


def canonical(stored: str) -> str:
    """Return the name that bundles have for a tensor of a checkpoint's decoder."""
    return "language_model." + stored[stored.index("layers.") :]


@pytest.mark.parametrize("layout", every(2, FORMS))
def test_every_matrix_is_exactly_the_checkpoints(
    layout: Layout, quantised: MakeQuantised, repacked: Callable[..., Path]
) -> None:
    root, layers = repacked(layout), quantised(layout).layers
    found = decoder_matrices(root, quantised(layout))
    assert len(found) == len(layers)
    for name, layer in layers.items():
        np.testing.assert_array_equal(found[name], layer.matrix.T, err_msg=name)
    for graph in ("vision", "projector", "head"):
        assert stored_matrices(root / f"graphs/{graph}.onnx") == {}
    forms = read_bundle(root).manifest.weights
    assert (forms.decoder, forms.block_size) == FORMS[layout]
    assert forms.vision == "fp32"


def export(folder: Path, output: Path, *options: object) -> tuple[dict[str, Any], str]:
    done = succeed("sinkprune-export", folder, "-o", output, "--budgets", "retain-64", "--json", *options)
    return json.loads(done.stdout), done.stderr


INT4, INT8 = ["--weights", "int4"], ["--weights", "int8"]


@pytest.mark.parametrize(
    ("layout", "options", "form", "most"),
    [
        (AWQ, INT4, "int4", 0.2),
        (AWQ, [*INT4, "--dialect", "opset20"], "int4", 0.2),
        (REORDERED, INT8, "int8", 0.02),
        (EIGHT, INT8, "int8", 0.02),
        (EIGHT_ASYMMETRIC, [], "int8", 0.02),
    ],
)
def test_errors_of_a_second_rounding_are_reported(
    layout: Layout, options: list[str], form: str, most: float, quantised: MakeQuantised, tmp_path: Path
) -> None:
    summary, message = export(quantised(layout).folder, tmp_path / "out", *options)
    layers, found = quantised(layout).layers, decoder_matrices(tmp_path / "out", quantised(layout))
    norms = {name: np.linalg.norm(layer.matrix) for name, layer in layers.items()}
    errors = {name: np.linalg.norm(found[name] - layer.matrix.T) for name, layer in layers.items()}
    together = np.linalg.norm([*errors.values()]) / np.linalg.norm([*norms.values()])
    worst = max(errors, key=lambda name: errors[name] / norms[name])
    largest = {"layer": canonical(worst), "relative_error": pytest.approx(errors[worst] / norms[worst], rel=1e-4)}
    assert summary["weights"] == form
    error = pytest.approx(together, rel=1e-4)
    assert summary["requantised"] == {"layers": len(layers), "relative_error": error, "largest": largest}
    assert most / 20 < together < most
    assert f"{together:.2%}" in message and canonical(worst) in message


@pytest.mark.parametrize(
    ("options", "head", "vision", "repacked_too"),
    [
        ([], "fp32", "fp32", True),
        (INT4, "int4", "int8", True),
        (["--vision-weights", "int8"], "fp32", "int8", True),
        (["--weights", "fp16"], "fp16", "fp16", False),
    ],
)
def test_floats_have_the_requested_forms(
    options: list[str], head: str, vision: str, repacked_too: bool, quantised: MakeQuantised, tmp_path: Path
) -> None:
    made = quantised(GPTQ)
    summary, message = export(made.folder, tmp_path / "out", *options)
    assert summary["requantised"] is None and message == ""
    assert summary["vision_weights"] == vision
    types = {"fp32": set(), "fp16": set(), "int8": {onnx.TensorProto.INT8}, "int4": {onnx.TensorProto.INT4}}
    for graph, form in (("head", head), ("vision", vision)):
        found = onnx.load(tmp_path / f"out/graphs/{graph}.onnx").graph.initializer
        assert {t.data_type for t in found} & {onnx.TensorProto.INT8, onnx.TensorProto.INT4} == types[form]
    matrices = decoder_matrices(tmp_path / "out", made)
    assert bool(matrices) == repacked_too
    for name, matrix in matrices.items():
        np.testing.assert_array_equal(matrix, made.layers[name].matrix.T)


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        (AWQ, [], "Export with --weights int4, which rounds them again"),
        (GPTQ, ["--vision-weights", "uint4"], "Export with --vision-weights int4"),
        (EIGHT, [], "Export with --weights int8, which rounds again"),
    ],
)
def test_what_tensorrt_10_3_does_not_take_is_rejected(
    layout: Layout, options: list[str], message: str, quantised: MakeQuantised, tmp_path: Path
) -> None:
    done = run("sinkprune-export", quantised(layout).folder, "-o", tmp_path / "out", "--dialect", "opset20", *options)
    assert_refused(done, message)
    assert list(tmp_path.iterdir()) == []
