"""Wrong inputs of the corpus, and some new ones of a fixed seed; `make fuzz` tries more."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from conftest import make_once
from fuzz.inputs.cases import Case
from fuzz.inputs.sources import SOURCES, corpus, endless
from fuzz.subjects import Subjects, make_families
from fuzz.verdict import try_case
from fuzz.worker import Worker

SEED = 11
TRIED = 29
"""One turn of every kind."""


@pytest.fixture(scope="module")
def subjects(shared_folder: Path) -> Subjects:
    return Subjects(make_once(shared_folder / "subjects", make_families))


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


def found_before() -> Iterator[object]:
    """Yield the corpus. The suite runs a share of each kind, and `make test-slow` all."""
    one_of = {"templates/": 5, "manifests.jsonl": 3, "checkpoints.jsonl": 2}
    for number, (name, case) in enumerate(corpus()):
        every = next((count for kind, count in one_of.items() if name.startswith(kind)), 1)
        slow = number % every or (" export:" in name and number % 5)
        yield pytest.param(case, id=name, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("case", list(found_before()))
def test_what_was_found_before(case: Case, subjects: Subjects, worker: Worker) -> None:
    assert try_case(case, subjects, worker) == []


@pytest.mark.slow
def test_wrong_inputs_are_taken_or_refused(subjects: Subjects, worker: Worker) -> None:
    tried = list(islice(endless(subjects, SEED), TRIED))
    assert {kind for kind, _ in tried} == SOURCES.keys()
    failed = [(case.json(), faults) for _, case in tried if (faults := try_case(case, subjects, worker))]
    assert not failed
