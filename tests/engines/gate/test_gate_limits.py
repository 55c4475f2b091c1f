"""The limits of the gate: differences of rows, gaps of texts, ties between tokens, and chunks that noise changes.

Where two texts part, the graphs must find both tokens nearly as likely. An engine may choose the other of two tokens
only if their scores are equal but for rounding. A chunk may differ by more where noise changes the graphs' own: where
the pocket robot is about to close its gripper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.bundle import Bundle, read_bundle
from sinkprune.contract.engines_manifest import Limits
from sinkprune.contract.errors import EnginesError
from sinkprune.engines.build import build_engines
from sinkprune.engines.gate import comparing
from sinkprune.engines.gate.comparing import Gate, compare_engine, compare_texts, judged_by_noise, row_differences
from sinkprune.engines.gate.recording import NEW_TOKENS, GateQuestion, RecordedCall, Recording, record
from sinkprune.engines.gate.report import CHUNKS, ChunkReport, GraphReport, OutputReport
from sinkprune.engines.progress import SILENT
from sinkprune.engines.targets.onnxruntime import OnnxRuntimeBuilder
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from sinkprune.runtime.backends import Backend, Engine, load_backend
from sinkprune.runtime.backends.compatibility import open_engines
from sinkprune.runtime.backends.models import Model
from support.programs.repository import ROOT
from support.stand_ins.gate_faults import Alter, plant, scaled


@pytest.fixture(scope="module")
def source(bundle: Callable[..., Path]) -> Bundle:
    return read_bundle(bundle("gqa-112", budgets=("retain-64",)))


@pytest.fixture(scope="module")
def recording(source: Bundle, photo: Image.Image, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    question = GateQuestion([photo], "What is on the table?")
    return record(source, question, tmp_path_factory.mktemp("texts") / "recording", SILENT)


@pytest.fixture(scope="module")
def engines(source: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Correct engines."""
    folder = tmp_path_factory.mktemp("engines") / "out"
    build_engines(source, folder, OnnxRuntimeBuilder(), Limits(60, 10, 1))
    return folder


def raised(token: int, place: int) -> Any:
    """Return a `Wrap` that raises the logit of one token from the new token `place` on."""
    calls = count()

    def wrap(graph: str, engine: Engine, backend: Backend) -> Engine:
        def louder(inputs: Mapping[str, Any]) -> dict[str, Any]:
            logits = backend.numpy(engine(inputs)["logits"])
            logits[..., token] += 1e3 if next(calls) >= place else 0
            return {"logits": backend.tensor(logits)}

        return louder if graph == "head" else engine

    return wrap


@pytest.mark.parametrize("place", [0, 3])
def test_the_gap_is_that_of_the_graphs_logits(place: int, source: Bundle, recording: Recording) -> None:
    expected = recording.logits(0)[place].astype(np.float64)
    second = int(np.argsort(expected)[-2])
    gap = float((expected.max() - expected[second]) / expected.std())
    fp32, int8 = (
        compare_texts(Pipeline.load(source, wrap=raised(second, place)), recording, rounding)[0]
        for rounding in ("fp32", "int8")
    )
    assert fp32.same_tokens == place
    assert fp32.gap == pytest.approx(gap)
    assert not fp32.passed
    assert int8.passed == (gap <= 0.5)
    assert len(recording.answers[0].token_ids) == NEW_TOKENS
    assert fp32.kept_alike == 1
    assert (fp32.gap_limit, int8.gap_limit) == (1e-3, 0.5)


def test_the_same_text_passes_and_other_kept_tokens_have_no_limit(source: Bundle, recording: Recording) -> None:
    texts = compare_texts(Pipeline.load(source), recording, "fp32")
    assert [(text.same_tokens, text.gap, text.passed, text.found) for text in texts] == [
        (NEW_TOKENS, 0.0, True, answer.text) for answer in recording.answers
    ]
    others = copy(recording)
    others.answers = [answer._replace(kept=[[-1, *own[1:]] for own in answer.kept]) for answer in recording.answers]
    assert {(text.gap_limit, text.passed) for text in compare_texts(Pipeline.load(source), others, "fp32")} == {
        (None, True)
    }


def test_wrong_answers_of_a_folder_are_rejected(
    source: Bundle, recording: Recording, engines: Path, tmp_path: Path
) -> None:
    gate = Gate(recording.question)
    gate.record_graphs(source, "onnxruntime", tmp_path / "recording", SILENT)
    gate.check_answers(engines)
    planted = plant(source, engines, "head", scaled("logits", -1), tmp_path)
    with pytest.raises(EnginesError, match=r"each engine passes alone, but the answer of all.* at token 1 of"):
        gate.check_answers(planted)


@pytest.mark.parametrize("kind", ["rows", "values", "logits", "actions"])
def test_rows_against_plain_numpy(kind: Any) -> None:
    """Logits and actions are compared with the length of a usual one: a velocity may be near zero."""
    draw = np.random.default_rng(0)
    expected = draw.standard_normal((2, 5, 7))
    expected[0, 0] *= 1000
    expected[0, 2] *= 1e-6
    found = expected + 0.01 * draw.standard_normal(expected.shape)
    width = 7 if kind in ("rows", "actions") else 1
    rows = expected.reshape(-1, width)
    lengths = np.sqrt((rows**2).sum(axis=1))
    usual = kind in ("logits", "actions")
    floors = np.sqrt((lengths**2).mean()) if usual else np.maximum(lengths, 0.1 * np.median(lengths))
    wanted = np.sqrt(((found.reshape(-1, width) - rows) ** 2).sum(axis=1)) / floors
    np.testing.assert_allclose(row_differences(kind, found, expected), wanted)
    # A row that is a thousand times larger hides no difference.
    if kind == "rows":
        expected[1, 1, 0] += 1
        assert row_differences(kind, found, expected).max() > 0.1


def test_what_is_not_finite_or_of_another_shape_differs_infinitely_and_indices_are_counted() -> None:
    for wrong in (np.nan, np.inf, -np.inf):
        found = np.ones((1, 3, 4))
        found[0, 1, 2] = wrong
        assert row_differences("rows", found, np.ones((1, 3, 4))).max() == np.inf
    assert row_differences("rows", np.ones((1, 2, 4)), np.ones((1, 3, 4))).max() == np.inf
    assert row_differences("indices", np.array([1, 2, 4]), np.array([1, 2, 3])) == [1]
    assert row_differences("indices", np.array([1, 2]), np.array([1, 2, 3])) == [3]
    assert row_differences("indices", np.array([], np.int64), np.array([], np.int64)) == [0]


GRAPH = "sinkpruner/retain-64/select_after_1"
Array = np.ndarray[Any, Any]


class Select:
    """A graph that selects, its call for a photo, and correct engines."""

    def __init__(self, bundle: Bundle, recording: Recording, engines: Path) -> None:
        self.bundle, self._engines = bundle, engines
        (self.call,) = recording.calls(GRAPH)
        self._backend = load_backend("ort-cpu", compute="fp32")
        self._engine = self._backend.load(Model.of_bundle(bundle, GRAPH))

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        outputs = self._engine({name: self._backend.tensor(array) for name, array in inputs.items()})
        return {name: self._backend.numpy(tensor) for name, tensor in outputs.items()}

    def compared(self, call: RecordedCall, alter: Alter, folder: Path) -> GraphReport:
        """Return the report of an engine that `alter` has altered."""
        folder.mkdir()
        built = open_engines(plant(self.bundle, self._engines, GRAPH, alter, folder), self.bundle)
        one_call = Mock(spec=Recording, calls=lambda graph: iter([call]))
        report = compare_engine(GRAPH, built, load_backend("ort-cpu", None, built), one_call)
        assert (report.refused is None) == all(output.passed for output in report.outputs.values())
        return report


@pytest.fixture(scope="module")
def select(source: Bundle, recording: Recording, engines: Path) -> Select:
    return Select(source, recording, engines)


@pytest.fixture(scope="module")
def tied(select: Select) -> tuple[RecordedCall, int]:
    """Return a call in which the last kept token and a dropped token have equal keys, and the row of the latter."""
    inputs, kept = select.call.inputs, select.call.outputs["keep_index"]
    visual = inputs["visual_index"]
    dropped = next(row for row in visual[::-1] if row not in kept)
    for row in visual:
        key = inputs["key"].copy()
        key[:, :, dropped] = key[:, :, row]
        alike = {**inputs, "key": key}
        outputs = select.run(alike)
        if row != dropped and (row in outputs["keep_index"]) != (dropped in outputs["keep_index"]):
            return RecordedCall(alike, outputs), int(dropped)
    raise AssertionError("found no last kept token")


def larger_key(row: int, rows: int, share: float) -> Alter:
    """Increase the key of one row by a share, as another order of summation may."""

    def alter(model: onnx.ModelProto) -> None:
        factors = np.ones((1, 1, rows, 1), np.float32)
        factors[0, 0, row] += share
        for node in model.graph.node:
            for place, name in enumerate(node.input):
                if name == "key":
                    node.input[place] = "key_scaled"
        model.graph.initializer.append(numpy_helper.from_array(factors, "key_factors"))
        model.graph.node.insert(0, helper.make_node("Mul", ["key", "key_factors"], ["key_scaled"]))

    return alter


def test_either_choice_of_a_tie_passes_and_another_one_is_rejected(
    select: Select, tied: tuple[RecordedCall, int], tmp_path: Path
) -> None:
    tie, row = tied
    rows = tie.inputs["key"].shape[2]

    def found(call: RecordedCall, share: float) -> list[OutputReport]:
        """Return the reports of two engines, in which the row's key is larger or smaller by a share."""
        engines = [(larger_key(row, rows, by), tmp_path / f"{by}") for by in (share, -share)]
        return [select.compared(call, *engine).outputs["keep_index"] for engine in engines]

    either = found(tie, 1e-6)
    assert all(output.passed for output in either)
    assert sorted(output.ties for output in either) == [0, 1]
    # The keys of the two tokens differ.
    another = found(select.call, 5.0)
    assert not all(output.passed for output in another)
    assert all(output.ties == 0 for output in another)
    # After another choice of a tie, the rows must be those of the kept tokens.
    for share in (2e-6, -2e-6):
        engine = larger_key(row, rows, share)

        def alter(model: onnx.ModelProto, engine: Alter = engine) -> None:
            engine(model)
            scaled("hidden_out", 1.01)(model)

        assert select.compared(tie, alter, tmp_path / f"{share}").refused == "hidden_out"


BUDGET = "prune-80"
LIMIT = CHUNKS["bf16"]


@pytest.fixture(scope="module")
def acted(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """The pocket robot's, with the demo's a.jpg for both cameras."""
    with Image.open(ROOT / "demo" / "photos" / "coffee.jpg") as photo:
        frame = photo.convert("RGB").crop((0, 0, photo.height, photo.height))
    folder = tmp_path_factory.mktemp("robot")
    source = str(ROOT / "demo" / "pocket-robot")
    request = ExportRequest(source, budgets=(BUDGET,), max_images=2, methods=("sinkpruner", "random"))
    export_bundle(request, folder / "bundle")
    question = GateQuestion([frame, frame], "pick the red star")
    return record(read_bundle(folder / "bundle"), question, folder / "recording", SILENT)


def reports(acted: Recording, difference: float) -> list[ChunkReport]:
    """What engines have whose chunks all differ by `difference`."""
    return [
        ChunkReport(own.method, own.budget, own.steps, 8, 7, difference, LIMIT, 1.0, difference <= LIMIT)
        for own in acted.chunks
    ]


def test_only_a_chunk_that_noise_changes_may_differ_by_more(
    acted: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Noise moves the close in three of eight runs.
    monkeypatch.setattr(comparing, "_RUNS", 24)
    given = reports(acted, 1.4)
    judged = judged_by_noise(given, acted, "bf16", SILENT)
    passed = {(own.method, own.budget): own.passed for own in judged}
    assert passed.pop(("random", BUDGET)) and not any(passed.values()) and ("sinkpruner", "none") in passed
    for before, after in zip(given, judged, strict=True):
        assert replace(after, limit=before.limit, passed=before.passed) == before
        assert after.limit == LIMIT or after.method == "random"
    wrong = judged_by_noise(reports(acted, 10.0), acted, "bf16", SILENT)
    assert not any(own.passed for own in wrong)


def test_the_limit_is_twice_the_largest_change(acted: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that keep other tokens do not count."""
    changes = iter([0.5, 3.0, 0.9, 0.1] * 10)

    def act(question: object, method: str, budget: str) -> object:
        expected = next(own for own in acted.chunks if (own.method, own.budget) == (method, budget))
        change = next(changes)
        kept = [own[1:] for own in expected.kept] if change == 3.0 else expected.kept
        actions = np.array(expected.actions)
        actions[3, 1] -= change
        return expected._replace(actions=actions.tolist(), kept=kept)

    monkeypatch.setattr(comparing, "load_act", lambda *given: act)
    judged = judged_by_noise(reports(acted, 1.5), acted, "bf16", SILENT)
    assert [(own.limit, own.passed) for own in judged] == [(1.8, True)] * len(judged)
