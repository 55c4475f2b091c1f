"""`sinkprune-calibrate quantize` from end to end on small bundles: what it writes, prints and refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from PIL import Image

from sinkprune import Pipeline
from sinkprune.calibration.quantise import layer_reports
from sinkprune.calibration.rounding import InputProducts, calibrated
from sinkprune.contract.bundle import Bundle, read_bundle
from sinkprune.contract.errors import TaskError
from sinkprune.contract.manifest import CHAT_TEMPLATE, EMBEDDING, TOKENIZER
from sinkprune.contract.precision import Array
from sinkprune.export.weights.rounding import rounded
from support.models.manifests import file_of
from support.models.tasks import PHOTOS, write_task
from support.programs.commands import assert_refused, run, succeed
from support.programs.slow_cases import slow_except
from support.references.steps import watched

Bundles = Callable[..., Path]
QUESTIONS = ["What is this?", "Is there a cup on the table?"]
QUANTIZE = ("sinkprune-calibrate", "quantize")
# Random weights make much of little.
ANY_ERROR = ("--max-error", "9", "--max-layer-error", "9")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two questions about each of two photos."""
    return write_task(tmp_path_factory.mktemp("task"), [(name, text) for name in PHOTOS for text in QUESTIONS])


@pytest.fixture(scope="module")
def quantised(bundle: Bundles, task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small bundle in int4, with the tower in int8, and its report as JSON and as a picture beside it."""
    folder = tmp_path_factory.mktemp("quantised")
    options = ("--weights", "int4", "--block-size", "32", *ANY_ERROR)
    files = ("--json", folder / "errors.json", "--plot", folder / "errors.png")
    outcome = succeed(*QUANTIZE, bundle("gqa-112"), "--data", task, "-o", folder / "out", *options, *files)
    assert "needs about" in outcome.stderr and "GB are free" in outcome.stderr
    assert "worst 10 of" in outcome.stdout and "weights int4, vision int8" in outcome.stdout
    assert read_bundle(folder / "out").sha256 in outcome.stdout
    sample, unseen = json.loads((folder / "errors.json").read_text())["warnings"]
    assert "2 prompts" in sample and "a part of the picture in 2 of 2 prompts" in unseen
    return folder / "out"


def test_all_but_the_matrices_is_as_it_was(bundle: Bundles, quantised: Path) -> None:
    before, after = read_bundle(bundle("gqa-112")), read_bundle(quantised)
    after.verify()
    assert after.manifest.files.keys() == before.manifest.files.keys()
    forms = after.manifest.weights
    assert (forms.decoder, forms.vision, forms.block_size) == ("int4", "int8", 32)
    assert after.manifest.graphs == before.manifest.graphs
    plans = [graph for graph in before.manifest.graphs if "/" in graph]
    same = [EMBEDDING, TOKENIZER, CHAT_TEMPLATE, *(before.manifest.graphs[graph].file for graph in plans)]
    for name in same:
        assert after.manifest.files[name] == before.manifest.files[name]
    kept, given = (weights(found, "decoder_0") for found in (after, before))
    assert kept.keys() > given.keys()
    for name in given.keys() - {name.removesuffix(".scale") for name in kept if name.endswith(".scale")}:
        np.testing.assert_array_equal(kept[name], given[name])


def weights(bundle: Bundle, graph: str) -> dict[str, Array]:
    """What a graph holds, by name."""
    model = onnx.load(file_of(bundle, graph))
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def test_no_layer_is_further_off_than_to_the_nearest(quantised: Path) -> None:
    report = json.loads((quantised.parent / "errors.json").read_text())
    layers = report["layers"]
    assert [layer["bits"] for layer in layers] == [8 if layer["graph"] == "vision" else 4 for layer in layers]
    decoders = {f"decoder_{segment}" for segment in range(3)}
    assert {layer["graph"] for layer in layers} == {"vision", "projector", *decoders, "head"}
    for layer in layers:
        assert 0 < layer["error"] <= layer["to_nearest"], layer["matrix"]
    assert report["logits"]["relative_l2"] < report["to_nearest"]["relative_l2"]
    assert report["prompts"] == 2
    with Image.open(quantised.parent / "errors.png") as plot:
        assert plot.width > 500


def test_each_of_them_has_the_error_of_its_own_outputs() -> None:
    random = np.random.default_rng(0)
    seen, weight = random.standard_normal((50, 32), np.float32), random.standard_normal((12, 32), np.float32)
    # A layer with small weights, whose error is small in the sum.
    weight[8:10] *= 1e-3
    found = calibrated(weight, InputProducts(seen.T @ seen), 7, 32, np.dtype(np.float32))
    parts = {"q": 8, "k": 2, "v": 2}
    reports = layer_reports("decoder_0", parts, 4, found)
    assert {report.matrix: (report.inputs, report.outputs) for report in reports} == {
        part: (32, outputs) for part, outputs in parts.items()
    }
    nearest = rounded(weight, 7, 32, np.dtype(np.float32))
    for report, rows in zip(reports, (slice(8), slice(8, 10), slice(10, 12)), strict=True):
        exact = seen @ weight[rows].T
        for told, of in ((report.error, found.rounded), (report.to_nearest, nearest)):
            off = seen @ of.values()[rows].T
            assert told == pytest.approx(np.linalg.norm(off - exact) / np.linalg.norm(exact), rel=1e-3)


def logits(pipeline: Pipeline, folder: Path) -> Array:
    """The first tokens' logits for the first picture with its first question, and the second with its second."""
    asked = zip(PHOTOS, QUESTIONS, strict=True)
    steps = [watched(pipeline, folder / name, text, budget="none", max_new_tokens=1) for name, text in asked]
    return np.array([step.logits[0] for step in steps])


@pytest.mark.parametrize("name", slow_except({"gqa-112"}, ["gqa-112", "next", "qwen"]))
def test_the_logits_error_is_that_of_the_two_bundles(
    name: str, bundle: Bundles, task: Path, pipeline: Callable[..., Pipeline], tmp_path: Path
) -> None:
    options = ("--weights", "int8", "--json", *ANY_ERROR)
    outcome = succeed(*QUANTIZE, bundle(name), "--data", task, "-o", tmp_path / "out", *options)
    exact = logits(pipeline(name), task.parent)
    found = logits(Pipeline.load(tmp_path / "out"), task.parent)
    printed = json.loads(outcome.stdout)
    assert printed["sha256"] == read_bundle(tmp_path / "out").sha256
    report = printed["logits"]
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    # The pipeline's engine rounds states too.
    assert 0.3 * error < report["relative_l2"] < 1.5 * error
    assert 0 <= report["kl"] < 1 and report["top_1"] in (0, 0.5, 1)


def test_a_tower_may_stay_as_it_is_and_states_be_fp16(bundle: Bundles, task: Path, tmp_path: Path) -> None:
    floats, output = bundle("gqa-112", "fp16"), tmp_path / "out"
    tower = ("--weights", "int8", "--vision-weights", "fp16", "--limit", "1", *ANY_ERROR)
    succeed(*QUANTIZE, floats, "--data", task, "-o", output, *tower)
    before, after = read_bundle(floats).manifest, read_bundle(output).manifest
    assert (after.weights.decoder, after.weights.vision) == ("int8", "fp16")
    name = "graphs/weights/vision.bin"
    assert after.files[name] == before.files[name]
    assert after.weight_bytes("decoder_0") < 0.7 * before.weight_bytes("decoder_0")


def test_past_a_limit_nothing_is_written(bundle: Bundles, task: Path, tmp_path: Path) -> None:
    for option, other, what in (
        ("--max-error", "--max-layer-error", "the logits"),
        ("--max-layer-error", "--max-error", "a layer's output"),
    ):
        options = ("--weights", "int4", option, "0.0001", other, "9", "--json", tmp_path / "errors.json")
        outcome = run(*QUANTIZE, bundle("gqa-112"), "--data", task, "-o", tmp_path / "out", *options)
        assert (outcome.code, outcome.stdout) == (2, "")
        message = outcome.stderr.splitlines()[-1]
        assert f"changes {what} by 0." in message and f"at most 0.0001 ({option})" in message
        assert "_proj.weight' of decoder_" in message and "--weights int8" in message
        assert list(tmp_path.iterdir()) == []


def test_what_makes_no_sense_is_refused(bundle: Bundles, task: Path, tmp_path: Path) -> None:
    for form, options, said in (
        ("int8", [], "the bundle's weights are int8, so what they were before is lost."),
        (None, ["--vision-weights", "bf16"], "--vision-weights is bf16, expected int8 or int4, or fp32"),
        (None, ["--block-size", "64"], "--block-size is 64, but no weights are int4."),
        (None, ["--data", "scenes"], "the test set"),
        (None, ["--limit", "0"], "--limit is 0, expected a whole number from 1"),
        (None, ["--max-error", "nan"], "--max-error is nan, expected 0 or more"),
    ):
        asked = (bundle("gqa-112", weights=form), "--data", task, "-o", tmp_path / "out", "--weights", "int8")
        assert_refused(run(*QUANTIZE, *asked, *options), said)
    assert list(tmp_path.iterdir()) == []


def test_the_fit_of_the_command_reaches_the_prompts(
    bundle: Bundles, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def noted(source: Bundle, items: object, fit: str | None) -> list[object]:
        raise TaskError(f"the fit is {fit}")

    monkeypatch.setattr("sinkprune.calibration.weight_graphs.encode_prompts", noted)
    words = (bundle("gqa-112"), "--data", task, "-o", tmp_path / "out", "--weights", "int4", "--fit", "pad")
    assert_refused(run(*QUANTIZE, *words), "the fit is pad")
