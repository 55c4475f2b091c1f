"""The fuzzer finds a planted fault of each kind, and no fault in correct commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fuzz.verdict import Fault, faults_of, files_of
from fuzz.worker import Call, Outcome, Worker

# Devouring memory takes half a minute on a busy machine.
SECONDS, SECONDS_OF_A_HANG = 200.0, 2.0


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(("fuzz.inputs.planted",)) as worker:
        yield worker


@pytest.fixture
def place(tmp_path: Path) -> Path:
    place = tmp_path / "place"
    (place / "home").mkdir(parents=True)
    (place / "input.txt").write_text("as it was", encoding="utf-8")
    return place


def called(worker: Worker, place: Path, planted: str, *arguments: str, honest: Outcome | None = None) -> Outcome:
    most = honest.address_space + (3 << 29) if honest and honest.address_space else None
    seconds = SECONDS_OF_A_HANG if planted == "hangs" else SECONDS
    return worker(Call(f"fuzz.inputs.planted:{planted}", arguments, str(place), str(place / "home"), seconds, most))


def faults(worker: Worker, place: Path, planted: str, *arguments: str) -> list[Fault]:
    honest, before = called(worker, place, "well"), files_of(place)
    outcome = called(worker, place, planted, *arguments, honest=honest)
    return faults_of(outcome, honest, before, files_of(place), None, same_answer=True)


@pytest.mark.parametrize("planted", ["well", "refuses"])
def test_what_is_well_has_no_fault(planted: str, worker: Worker, place: Path) -> None:
    assert faults(worker, place, planted) == []


@pytest.mark.parametrize(
    ("planted", "kind", "said"),
    [
        ("raises", "traceback", "heads"),
        ("hangs", "hang", "planted.py"),
        ("aborts", "abort", "signal 6"),
        ("devours", "memory", ""),
        ("another_answer", "answer", "[1, 3]"),
        ("litters", "stray file", "out.partial"),
        ("runs_foreign_code", "escape", "evil.py"),
    ],
)
def test_a_planted_fault_is_found(planted: str, kind: str, said: str, worker: Worker, place: Path) -> None:
    found = faults(worker, place, planted)
    assert kind in [fault.kind for fault in found]
    assert any(said in fault.detail for fault in found)
