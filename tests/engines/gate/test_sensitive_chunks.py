"""Chunks that noise changes much: where the pocket robot is about to close its gripper."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from sinkprune.contract.bundle import Bundle, read_bundle
from sinkprune.engines.gate import comparing as sensitive_chunks
from sinkprune.engines.gate.comparing import judged_by_noise
from sinkprune.engines.gate.recording import GateQuestion, Recording, record
from sinkprune.engines.gate.report import ChunkReport, chunk_limit
from sinkprune.engines.progress import SILENT
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from support.programs.repository import ROOT

BUDGET = "prune-80"
LIMIT = chunk_limit("bf16", 1)


@pytest.fixture(scope="module")
def question() -> GateQuestion:
    """The demo's a.jpg, for both cameras."""
    with Image.open(ROOT / "demo" / "photos" / "coffee.jpg") as photo:
        frame = photo.convert("RGB").crop((0, 0, photo.height, photo.height))
    return GateQuestion([frame, frame], "pick the red star")


@pytest.fixture(scope="module")
def robot(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("robot")
    source = str(ROOT / "demo" / "pocket-robot")
    request = ExportRequest(source, budgets=(BUDGET,), max_images=2, methods=("sinkpruner", "random"))
    export_bundle(request, folder / "bundle")
    return read_bundle(folder / "bundle")


@pytest.fixture(scope="module")
def recording(robot: Bundle, question: GateQuestion, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return record(robot, question, tmp_path_factory.mktemp("calls") / "recording", SILENT)


def reports(recording: Recording, difference: float) -> list[ChunkReport]:
    """What engines have whose chunks all differ by `difference`."""
    assert LIMIT is not None
    return [
        ChunkReport(own.method, own.budget, own.steps, 8, 7, difference, LIMIT, 1.0, difference <= LIMIT)
        for own in recording.chunks
    ]


def test_only_a_chunk_that_noise_changes_may_differ_by_more(
    robot: Bundle, question: GateQuestion, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Noise moves the close in three of eight runs.
    monkeypatch.setattr(sensitive_chunks, "_RUNS", 24)
    given = reports(recording, 1.4)
    judged = judged_by_noise(given, recording, robot, question, "bf16", SILENT)
    passed = {(own.method, own.budget): own.passed for own in judged}
    assert passed.pop(("random", BUDGET)) and not any(passed.values()) and ("sinkpruner", "none") in passed
    for before, after in zip(given, judged, strict=True):
        assert replace(after, limit=before.limit, passed=before.passed) == before
        assert after.limit == LIMIT or after.method == "random"
    wrong = judged_by_noise(reports(recording, 10.0), recording, robot, question, "bf16", SILENT)
    assert not any(own.passed for own in wrong)


def test_the_limit_is_twice_the_largest_change(
    robot: Bundle, question: GateQuestion, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that keep other tokens do not count."""
    changes = iter([0.5, 3.0, 0.9, 0.1] * 10)

    def act(question: object, method: str, budget: str) -> object:
        expected = next(own for own in recording.chunks if (own.method, own.budget) == (method, budget))
        change = next(changes)
        kept = [own[1:] for own in expected.kept] if change == 3.0 else expected.kept
        actions = np.array(expected.actions)
        actions[3, 1] -= change
        return expected._replace(actions=actions.tolist(), kept=kept)

    monkeypatch.setattr(sensitive_chunks, "load_act", lambda *given: act)
    judged = judged_by_noise(reports(recording, 1.5), recording, robot, question, "bf16", SILENT)
    assert [(own.limit, own.passed) for own in judged] == [(1.8, True)] * len(judged)
