"""The fuzzer finds a planted fault of each kind, and no fault in correct commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fuzz.verdict import faults_of, files_of
from fuzz.worker import Call, Outcome, Worker


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(("fuzz.inputs.planted",)) as worker:
        yield worker


@pytest.mark.parametrize(
    ("planted", "kinds", "said"),
    [
        ("nothing", [], ""),
        ("refusal", [], ""),
        ("another answer", ["answer"], "[1, 3]"),
        ("traceback", ["traceback"], "heads"),
        ("hang", ["hang"], "planted.py"),
        ("abort", ["abort"], "signal 6"),
        ("memory", ["memory"], "MB more than the honest input"),
        ("stray file", ["stray file"], "out.partial"),
        ("escape", ["escape"], "evil.py"),
    ],
)
def test_a_planted_fault_is_found(planted: str, kinds: list[str], said: str, worker: Worker, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()

    def outcome(planted: str, most: int | None) -> Outcome:
        seconds = 2.0 if planted == "hang" else 200.0
        place = str(tmp_path), str(tmp_path / "home")
        return worker(Call("fuzz.inputs.planted:planted", (planted,), *place, seconds, most))

    honest, before = outcome("nothing", None), files_of(tmp_path)
    assert honest.address_space is not None
    found = outcome(planted, honest.address_space + (3 << 29))
    faults = faults_of(found, honest, before, files_of(tmp_path), None, same_answer=True)
    assert [fault.kind for fault in faults] == kinds
    assert not kinds or said in faults[-1].detail
