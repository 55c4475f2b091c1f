"""An engine may choose the other of two tokens only if their scores are equal but for rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from PIL import Image

from sinkprune.contract.bundle import Bundle, read_bundle
from sinkprune.contract.engines_manifest import Limits
from sinkprune.engines.build import build_engines
from sinkprune.engines.gate.comparing import compare_engine
from sinkprune.engines.gate.recording import GateQuestion, RecordedCall, Recording, record
from sinkprune.engines.gate.report import OutputReport
from sinkprune.engines.progress import SILENT
from sinkprune.engines.targets.onnxruntime import OnnxRuntimeBuilder
from sinkprune.runtime.backends import load_backend
from sinkprune.runtime.backends.compatibility import open_engines
from sinkprune.runtime.backends.models import Model
from support.stand_ins.gate_faults import Alter, plant, scaled

GRAPH = "sinkpruner/retain-64/select_after_1"
Array = np.ndarray[Any, Any]


class OneCall(Recording):
    """A recording of one call of `GRAPH`."""

    def __init__(self, folder: Path, call: RecordedCall) -> None:
        super().__init__(folder)
        self._call = call

    def calls(self, graph: str) -> Iterator[RecordedCall]:
        yield self._call


class Select:
    """A graph that selects, its call for a photo, and correct engines."""

    def __init__(self, bundle: Bundle, photo: Image.Image, folder: Path) -> None:
        self.bundle, self.folder = bundle, folder
        self.recording = record(bundle, GateQuestion([photo], "What is on the table?"), folder / "recording", SILENT)
        (self.call,) = self.recording.calls(GRAPH)
        self._backend = load_backend("ort-cpu", compute="fp32")
        self._engine = self._backend.load(Model.of_bundle(bundle, GRAPH))
        build_engines(bundle, folder / "engines", OnnxRuntimeBuilder(), Limits(60, 10, 1))

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        outputs = self._engine({name: self._backend.tensor(array) for name, array in inputs.items()})
        return {name: self._backend.numpy(tensor) for name, tensor in outputs.items()}

    def compared(self, call: RecordedCall, engines: Path) -> OutputReport:
        built = open_engines(engines, self.bundle)
        backend = load_backend("ort-cpu", None, built)
        report = compare_engine(GRAPH, built, backend, OneCall(self.folder / "recording", call))
        assert (report.refused is None) == all(output.passed for output in report.outputs.values())
        return report.outputs["keep_index"]


@pytest.fixture(scope="module")
def select(bundle: Callable[..., Path], photo: Image.Image, tmp_path_factory: pytest.TempPathFactory) -> Select:
    source = read_bundle(bundle("gqa-112", budgets=("retain-64",)))
    return Select(source, photo, tmp_path_factory.mktemp("ties"))


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


def keys_apart(select: Select, call: RecordedCall, row: int, share: float, folder: Path) -> list[OutputReport]:
    """Return the reports of two engines, in which the row's key is larger or smaller by a share."""
    found = []
    for sign in (1, -1):
        place = folder / f"{sign}"
        place.mkdir()
        fault = larger_key(row, call.inputs["key"].shape[2], sign * share)
        planted = plant(select.bundle, select.folder / "engines", GRAPH, fault, place)
        found.append(select.compared(call, planted))
    return found


def test_either_choice_of_a_tie_passes(select: Select, tied: tuple[RecordedCall, int], tmp_path: Path) -> None:
    call, row = tied
    found = keys_apart(select, call, row, 1e-6, tmp_path)
    assert all(output.passed for output in found)
    assert sorted(output.ties for output in found) == [0, 1]


def test_another_choice_without_a_tie_is_rejected(
    select: Select, tied: tuple[RecordedCall, int], tmp_path: Path
) -> None:
    """The keys of the two tokens differ."""
    _, row = tied
    found = keys_apart(select, select.call, row, 5.0, tmp_path)
    assert not all(output.passed for output in found)
    assert all(output.ties == 0 for output in found)


def test_a_tie_does_not_excuse_other_rows(select: Select, tied: tuple[RecordedCall, int], tmp_path: Path) -> None:
    """After another choice of a tie, the rows must be those of the kept tokens."""
    call, row = tied
    for share in (1e-6, -1e-6):
        engine = larger_key(row, call.inputs["key"].shape[2], share)

        def alter(model: onnx.ModelProto, engine: Alter = engine) -> None:
            engine(model)
            scaled("hidden_out", 1.01)(model)

        place = tmp_path / f"{share}"
        place.mkdir()
        planted = plant(select.bundle, select.folder / "engines", GRAPH, alter, place)
        built = open_engines(planted, select.bundle)
        recording = OneCall(select.folder / "recording", call)
        report = compare_engine(GRAPH, built, load_backend("ort-cpu", None, built), recording)
        assert report.refused == "hidden_out"
