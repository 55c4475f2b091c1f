"""The gate on policies: chunks of actions, caches of the prefix, and a fault planted into each engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import EnginesError
from sinkprune.engines.gate.comparing import Gate, check_engines, compare_chunks, engines_alone, row_differences
from sinkprune.engines.gate.recording import record
from sinkprune.engines.gate.report import chunk_limit, first_refusal
from sinkprune.engines.progress import SILENT
from sinkprune.policies.gate import load_act
from sinkprune.runtime.backends import Backend, Engine, load_backend
from sinkprune.runtime.backends.compatibility import open_engines
from sinkprune.runtime.backends.known import backend_of
from support.programs.commands import assert_refused, run
from support.programs.slow_cases import slow_except
from support.references.honest_engines import Honest
from support.stand_ins.gate_faults import plant, scaled

BUDGET = "prune-80"
GRAPHS = (
    *("vision", "projector", "decoder_0", "decoder_1", "decoder_2", "decoder_3", "expert"),
    *(f"sinkpruner/{BUDGET}/{name}" for name in ("sanitizer", "select_after_1")),
)
TARGETS = ("onnxruntime", "openvino")
STEPS = 10


@pytest.fixture(scope="module")
def honest(
    bundle: Callable[..., Path], photo: Image.Image, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Honest]:
    made: dict[tuple[str, str], Honest] = {}

    def get(form: str = "fp32", dialect: str = "opset24") -> Honest:
        if (form, dialect) not in made:
            precision, weights = ("fp16", None) if form == "fp16" else ("fp32", None if form == "fp32" else form)
            # 4-bit weights take widths of blocks only.
            name = "pi0-bare" if form == "int4" else "pi0"
            options = {"max_images": 2, "dialect": dialect, "weights": weights}
            source = read_bundle(bundle(name, precision, (BUDGET,), **options))
            folder = tmp_path_factory.mktemp(f"gate-{form}-{dialect}")
            made[form, dialect] = Honest(source, folder, [photo, photo.rotate(90)], "pick up the cup")
        return made[form, dialect]

    return get


@pytest.mark.parametrize(
    ("form", "dialect", "target"),
    slow_except(
        {("fp32", "opset24", "openvino"), ("int8", "opset24", "openvino"), ("fp32", "opset20", "onnxruntime")},
        [
            *product(("fp32", "fp16", "int8", "int4"), ["opset24"], TARGETS),
            *product(("fp32", "fp16"), ["opset20"], TARGETS[:1]),
        ],
    ),
)
def test_honest_engines_pass(form: str, dialect: str, target: str, honest: Callable[..., Honest]) -> None:
    made = honest(form, dialect)
    built = open_engines(made.engines(target), made.bundle)
    backend = load_backend(backend_of(target), 1, built)
    report = check_engines(built, engines_alone(built.engines.path), backend, made.question, made.recording)
    assert report.passed and first_refusal(report, built.engines.manifest) is None
    assert set(report.graphs) == set(GRAPHS) == set(made.bundle.manifest.graphs)
    assert report.texts == [] and [chunk.budget for chunk in report.chunks] == ["none", BUDGET]
    for graph, own in report.graphs.items():
        # Caches are what the expert reads of the prefix.
        assert set(own.outputs) == {tensor.name for tensor in made.bundle.manifest.graphs[graph].outputs}
        for name, output in own.outputs.items():
            assert output.typical is not None and output.worst is not None
            assert 3 * output.typical <= output.typical_limit, (graph, name, output)
            assert 3 * output.worst <= output.worst_limit, (graph, name, output)
    unpruned = report.chunks[0]
    assert unpruned.limit is not None and 3 * unpruned.difference <= unpruned.limit
    assert (unpruned.steps, unpruned.kept_alike) == (STEPS, 1)
    assert report.graphs["expert"].calls == STEPS * len(report.chunks)
    assert report.graphs["vision"].calls == 1


def test_what_a_step_repeats_is_stored_once(honest: Callable[..., Honest], tmp_path: Path) -> None:
    made = honest()
    recording = record(made.bundle, made.question, tmp_path / "recording", SILENT)
    names = [set(np.load(path).files) for path in sorted((tmp_path / "recording" / "expert").glob("*.npz"))]
    outputs, changing = {"out.actions_out", "out.velocity"}, {"in.actions", "in.time_embedding"}
    assert {"in.past_key_0", "in.cos", "in.state", *changing, *outputs} < names[0]
    # Each budget begins with the same noise. The prefix's last rows are at other places in its caches.
    assert names[1:STEPS] == [changing | outputs] * (STEPS - 1)
    assert {"in.past_key_0", "in.length_0", *changing} <= names[STEPS]
    calls = list(recording.calls("expert"))
    assert all(
        set(call.inputs) == {one.name for one in made.bundle.manifest.graphs["expert"].inputs} for call in calls
    )
    for before, after in pairwise(calls[:STEPS]):
        np.testing.assert_array_equal(before.outputs["actions_out"], after.inputs["actions"])
        np.testing.assert_array_equal(before.inputs["past_value_7"], after.inputs["past_value_7"])


def shifted(by: float, action: int | None = None) -> Callable[[str, Engine, Backend], Engine]:
    """Add `by` to every action of each step, or to one of them."""

    def wrap(graph: str, engine: Engine, backend: Backend) -> Engine:
        def call(inputs: dict[str, object]) -> dict[str, object]:
            outputs = engine(inputs)
            actions = backend.numpy(outputs["actions_out"])
            actions[:, slice(None) if action is None else action] += np.float32(by)
            return {**outputs, "actions_out": backend.tensor(actions)}

        return call if graph == "expert" else engine

    return wrap


@pytest.mark.parametrize("by", [0.0, 1e-5, 0.02])
def test_a_chunk_that_differs_is_found_after_all_steps(by: float, honest: Callable[..., Honest]) -> None:
    """In fp32, and where much is rounded not unless it differs by more."""
    made = honest()
    act = load_act(made.bundle, load_backend("ort-cpu", compute="fp32"), None, shifted(by))
    for rounding in ("fp32", "int8"):
        reports = compare_chunks(act, made.question, made.recording, rounding)
        assert [(each.steps, each.actions, each.kept_alike) for each in reports] == [(STEPS, 5, 1.0)] * 2
        for report in reports:
            assert report.limit == chunk_limit(rounding, 1)
            assert report.passed == (report.difference <= report.limit)
            assert (report.difference == 0) == (by == 0)
            if by:
                # A step's error also moves all later steps.
                assert 0.5 * STEPS * by < report.difference < 5 * STEPS * by
        assert all(report.passed for report in reports) == (by < 0.01 or rounding == "int8")


def test_wrong_chunks_of_a_folder_are_rejected(honest: Callable[..., Honest], tmp_path: Path) -> None:
    made = honest()
    gate = Gate(made.question)
    gate.record_graphs(made.bundle, "onnxruntime", tmp_path / "recording", SILENT)
    gate.check_answers(made.engines("onnxruntime"))
    planted = plant(made.bundle, made.engines("onnxruntime"), "expert", scaled("actions_out", 1.01), tmp_path)
    said = r"but the chunk of all, by onnxruntime .* at action \d of budget 'none' .* standard deviations .* 0\.001"
    with pytest.raises(EnginesError, match=said):
        gate.check_answers(planted)


def test_actions_against_plain_numpy() -> None:
    """Each action is compared with the length of a usual one: a velocity may be near zero."""
    draw = np.random.default_rng(0)
    expected = draw.standard_normal((1, 5, 7))
    expected[0, 2] *= 1e-6
    found = expected + 0.01 * draw.standard_normal(expected.shape)
    usual = np.sqrt(np.mean([(row**2).sum() for row in expected[0]]))
    wanted = [np.sqrt(((own - other) ** 2).sum()) / usual for own, other in zip(found[0], expected[0], strict=True)]
    np.testing.assert_allclose(row_differences("actions", found, expected), wanted)


def test_the_commands(honest: Callable[..., Honest], photo_file: Path, tmp_path: Path) -> None:
    """One picture is the frame of every camera, and another number than the cameras' is refused."""
    source, output = honest().bundle.path, tmp_path / "engines"
    instruction = ("--prompt", "pick up the cup")
    built = run(
        "sinkprune-build", source, "-o", output, "--target", "onnxruntime", "--check", photo_file, *instruction
    )
    assert built.code == 0, built.stderr
    assert f"check passed: {len(GRAPHS)} engines" in built.stdout
    frames = ("--image", photo_file)
    checked = run("sinkprune-check", source, output, *frames, *frames, *instruction)
    assert checked.code == 0, checked.stderr
    assert f"passed: {len(GRAPHS)} engines, 2 chunks of actions" in checked.stdout
    assert "worst action" in checked.stdout and "same tokens" not in checked.stdout
    report = json.loads(run("sinkprune-check", source, output, *frames, "--json").stdout)
    assert (report["texts"], report["passed"], len(report["seen_share"])) == ([], True, 2)
    assert set(report["chunks"][0]) == {
        *("method", "budget", "steps", "actions", "worst_action", "difference", "limit", "kept_alike", "passed")
    }
    assert_refused(
        run("sinkprune-check", source, output, *frames * 3), "found 3 pictures, and the policy has 2 cameras"
    )
