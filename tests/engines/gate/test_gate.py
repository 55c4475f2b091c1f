"""The gate passes correct engines of models and policies at a third of the limits, and finds planted faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import EnginesError
from sinkprune.engines.gate.comparing import Gate, check_engines, compare_chunks, engines_alone
from sinkprune.engines.gate.recording import Recording, record
from sinkprune.engines.gate.report import CHUNKS, GraphReport, first_refusal
from sinkprune.engines.progress import SILENT
from sinkprune.policies.gate import load_act
from sinkprune.runtime.backends import Backend, Engine, load_backend
from sinkprune.runtime.backends.compatibility import open_engines
from sinkprune.runtime.backends.known import backend_of
from support.programs.commands import assert_refused, run, succeed
from support.programs.slow_cases import slow_except
from support.references.honest_engines import Honest
from support.stand_ins import gate_faults as faults
from support.stand_ins.processor_features import fastest_floats

WITH_WEIGHTS = ("vision", "projector", "decoder_0", "decoder_1", "decoder_2", "head")
CHOOSING = tuple(f"sinkpruner/retain-64/{name}" for name in ("sanitizer", "select_after_1"))
GRAPHS = (*WITH_WEIGHTS, *CHOOSING)
BUDGET = "prune-80"
OF_POLICY = (
    *(*WITH_WEIGHTS[:-1], "expert"),
    *(f"sinkpruner/{BUDGET}/{name}" for name in ("sanitizer", "select_after_1")),
)
TARGETS = ("onnxruntime", "openvino")
FORMS = ("fp32", "fp16", "int8", "int4")
STEPS = 10
Made = Callable[..., Honest]


@pytest.fixture(scope="module")
def honest(bundle: Callable[..., Path], photo: Image.Image, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return a function that makes correct engines of a small model, or of a policy of two cameras."""

    @cache
    def get(form: str = "fp32", *, policy: bool = False, dialect: str = "opset24") -> Honest:
        precision, weights = ("fp16", None) if form == "fp16" else ("fp32", None if form == "fp32" else form)
        name, budget, images, prompt = "gqa-112", "retain-64", [photo], "What is on the table?"
        options: dict[str, Any] = {"weights": weights, "dialect": dialect}
        if policy:
            # 4-bit weights take widths of blocks only.
            name, budget, options["max_images"] = "pi0-bare" if form == "int4" else "pi0", BUDGET, 2
            images, prompt = [photo, photo.rotate(90)], "pick up the cup"
        source = read_bundle(bundle(name, precision, (budget,), **options))
        return Honest(source, tmp_path_factory.mktemp(f"gate-{form}"), images, prompt)

    return get


@pytest.mark.parametrize(
    ("policy", "form", "dialect", "target"),
    slow_except(
        {
            (False, "fp32", "opset24", "onnxruntime"),
            (False, "fp16", "opset24", "openvino"),
            (True, "fp32", "opset24", "openvino"),
            (True, "int8", "opset24", "openvino"),
            (True, "fp32", "opset20", "onnxruntime"),
        },
        [
            *product((False, True), FORMS, ["opset24"], TARGETS),
            *product([True], ("fp32", "fp16"), ["opset20"], TARGETS[:1]),
        ],
    ),
)
def test_honest_engines_pass(policy: bool, form: str, dialect: str, target: str, honest: Made) -> None:
    made = honest(form, policy=policy, dialect=dialect)
    built = open_engines(made.engines(target), made.bundle)
    backend = load_backend(backend_of(target), 1, built)
    report = check_engines(built, engines_alone(built.engines.path), backend, made.recording)
    assert report.passed and first_refusal(report, built.engines.manifest) is None
    assert set(report.graphs) == {*(OF_POLICY if policy else GRAPHS)} == set(made.bundle.manifest.graphs)
    assert [text.budget for text in report.texts] == ([] if policy else ["none", "retain-64"])
    assert [chunk.budget for chunk in report.chunks] == (["none", BUDGET] if policy else [])
    for graph, own in report.graphs.items():
        compared = {tensor.name for tensor in made.bundle.manifest.graphs[graph].outputs}
        # A policy's caches are what the expert reads of the prefix.
        assert set(own.outputs) == {name for name in compared if policy or not name.startswith(("key_", "value_"))}
        for name, output in own.outputs.items():
            assert output.typical is not None and output.worst is not None
            assert 3 * output.typical <= output.typical_limit, (graph, name, output)
            assert 3 * output.worst <= output.worst_limit, (graph, name, output)
    if policy:
        unpruned = report.chunks[0]
        assert unpruned.limit is not None and 3 * unpruned.difference <= unpruned.limit
        assert (unpruned.steps, unpruned.kept_alike) == (STEPS, 1)
        assert report.graphs["expert"].calls == STEPS * len(report.chunks)
        assert report.graphs["vision"].calls == 1


def found(
    made: Honest, graph: str, fault: faults.Alter, folder: Path, target: str, compute: str | None = None
) -> GraphReport:
    """Return the report of engines with a fault in one graph."""
    planted = faults.plant(made.bundle, made.engines(target), graph, fault, folder)
    return made.compare(planted, graph, compute)


@pytest.mark.parametrize(
    ("form", "target", "compute", "fault"),
    [
        ("fp32", "onnxruntime", None, faults.one_weight),
        ("fp32", "openvino", "fp32", faults.one_weight),
        # Where much is rounded, another matrix
        ("fp32", "openvino", None, faults.scaled_weights),
        ("int8", "onnxruntime", None, faults.scaled_weights),
        ("int4", "openvino", None, faults.scaled_weights),
    ],
)
@pytest.mark.parametrize("graph", WITH_WEIGHTS)
def test_other_weights_are_found(
    graph: str, form: str, target: str, compute: str | None, fault: faults.Alter, honest: Made, tmp_path: Path
) -> None:
    made = honest(form)
    report = found(made, graph, fault, tmp_path, target, compute)
    if fault is faults.scaled_weights:
        assert report.rounding in (fastest_floats() if form == "fp32" else {"int8"})
    assert report.refused in {tensor.name for tensor in made.bundle.manifest.graphs[graph].outputs}


@pytest.mark.parametrize("graph", GRAPHS)
def test_swapped_outputs_are_found(graph: str, honest: Made, tmp_path: Path) -> None:
    made = honest()
    outputs = faults.like_outputs(made.bundle.manifest.graphs[graph].outputs)
    if outputs is None:
        assert graph in ("projector", "head") or graph.endswith("sanitizer")
        return
    report = found(made, graph, faults.swapped(*outputs), tmp_path, "onnxruntime")
    # A decoder's last outputs are new keys and values, which show at the next token.
    assert report.refused in ({"hidden_out"} if graph.startswith("decoder_") else set(outputs))


@pytest.mark.parametrize("saturating", [False, True], ids=["infinite", "saturating"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_an_overflow_of_fp16_is_found(graph: str, saturating: bool, honest: Made, tmp_path: Path) -> None:
    made = honest()
    output = made.bundle.manifest.graphs[graph].outputs[0].name
    report = found(made, graph, faults.overflowing(output, saturating=saturating), tmp_path, "onnxruntime")
    assert report.refused == output
    assert (report.outputs[output].worst is None) != saturating


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("graph", CHOOSING)
def test_another_choice_is_found(graph: str, target: str, honest: Made, tmp_path: Path) -> None:
    output = "kept_index" if graph.endswith("sanitizer") else "keep_index"
    for operator, operand in (("Add", [0, 1]), ("Gather", [1, 0])):
        (tmp_path / operator).mkdir()
        fault = faults.changed_indices(output, operator, operand)
        report = found(honest(), graph, fault, tmp_path / operator, target)
        assert report.refused == output
        assert (report.outputs[output].kind, report.outputs[output].ties) == ("indices", 0)


def test_what_a_step_repeats_is_stored_once(honest: Made, tmp_path: Path) -> None:
    made = honest(policy=True)
    record(made.bundle, made.question, tmp_path / "recording", SILENT)
    names = [set(np.load(path).files) for path in sorted((tmp_path / "recording" / "expert").glob("*.npz"))]
    outputs, changing = {"out.actions_out", "out.velocity"}, {"in.actions", "in.time_embedding"}
    assert {"in.past_key_0", "in.cos", "in.state", *changing, *outputs} < names[0]
    # Each budget begins with the same noise. The prefix's last rows are at other places in its caches.
    assert names[1:STEPS] == [changing | outputs] * (STEPS - 1)
    assert {"in.past_key_0", "in.length_0", *changing} <= names[STEPS]
    with pytest.raises(ValueError, match="of another question"):
        Recording(tmp_path / "recording", made.bundle, replace(made.question, prompt="pick up the plate"))


@pytest.mark.parametrize("by", [0.0, 1e-5, 0.02])
def test_a_chunk_that_differs_is_found_after_all_steps(by: float, honest: Made) -> None:
    """In fp32, and where much is rounded not unless it differs by more."""
    made = honest(policy=True)

    def shifted(graph: str, engine: Engine, backend: Backend) -> Engine:
        def call(inputs: dict[str, object]) -> dict[str, object]:
            outputs = engine(inputs)
            return {**outputs, "actions_out": backend.tensor(backend.numpy(outputs["actions_out"]) + np.float32(by))}

        return call if graph == "expert" else engine

    act = load_act(made.bundle, load_backend("ort-cpu", compute="fp32"), None, shifted)
    for rounding in ("fp32", "int8"):
        reports = compare_chunks(act, made.recording, rounding)
        assert [(each.steps, each.actions, each.kept_alike) for each in reports] == [(STEPS, 5, 1.0)] * 2
        for report in reports:
            assert report.limit == CHUNKS[rounding]
            assert report.passed == (report.difference <= report.limit)
            # A step's error also moves all later steps.
            assert 0.5 * STEPS * by <= report.difference <= 5 * STEPS * by
        assert all(report.passed for report in reports) == (by < 0.01 or rounding == "int8")


def test_wrong_chunks_of_a_folder_are_rejected(honest: Made, tmp_path: Path) -> None:
    made = honest(policy=True)
    gate, engines = Gate(made.question), made.engines("onnxruntime")
    gate.record_graphs(made.bundle, "onnxruntime", tmp_path / "recording", SILENT)
    gate.check_answers(engines)
    planted = faults.plant(made.bundle, engines, "expert", faults.scaled("actions_out", 1.01), tmp_path)
    said = r"but the chunk of all, by onnxruntime .* at action \d of budget 'none' .* standard deviations .* 0\.001"
    with pytest.raises(EnginesError, match=said):
        gate.check_answers(planted)


def test_the_commands_on_a_policy(honest: Made, photo_file: Path, tmp_path: Path) -> None:
    """One picture is the frame of every camera, and another number than the cameras' is refused."""
    source, output = honest(policy=True).bundle.path, tmp_path / "engines"
    frames, ask = ("--image", photo_file), ("--prompt", "pick up the cup")
    built = run("sinkprune-build", source, "-o", output, "--target", "onnxruntime", "--check", photo_file, *ask)
    assert built.code == 0 and f"check passed: {len(OF_POLICY)} engines" in built.stdout, built.stderr
    checked = succeed("sinkprune-check", source, output, *frames, *frames, *ask)
    assert f"passed: {len(OF_POLICY)} engines, 2 chunks of actions" in checked.stdout
    assert "worst action" in checked.stdout and "same tokens" not in checked.stdout
    report = json.loads(run("sinkprune-check", source, output, *frames, "--json").stdout)
    assert (report["texts"], report["passed"], len(report["seen_share"])) == ([], True, 2)
    assert len(report["chunks"]) == 2 and all(chunk["kept_alike"] == 1 for chunk in report["chunks"])
    refused = run("sinkprune-check", source, output, *frames * 3)
    assert_refused(refused, "found 3 pictures, and the policy has 2 cameras")
