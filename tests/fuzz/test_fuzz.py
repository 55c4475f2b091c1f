"""Some hundreds of wrong inputs, always the same ones, and all that were found before; `make fuzz` has no end."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from conftest import make_once
from fuzz.cases import Case, case_of
from fuzz.sources import SOURCES, corpus, endless
from fuzz.subjects import Subjects, make_families
from fuzz.trial import try_case
from fuzz.workers import Worker

SEED = 11
TRIED = 29
"""A turn of every kind."""


@pytest.fixture(scope="module")
def subjects(shared_folder: Path) -> Subjects:
    return Subjects(make_once(shared_folder / "subjects", make_families))


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


def found_before() -> Iterator[object]:
    """The corpus. Of templates the command is given every twentieth: test_template_bombs.py renders all of them. Of
    tokenizers it is given all at `run`, and every fifth at `export`."""
    for number, (name, case) in enumerate(corpus()):
        slow = (name.startswith("templates/") and number % 20) or (" export:" in name and number % 5)
        yield pytest.param(case, id=name, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("case", list(found_before()))
def test_what_was_found_before(case: Case, subjects: Subjects, worker: Worker) -> None:
    assert try_case(case, subjects, worker) == []


def test_wrong_inputs_are_taken_or_refused(subjects: Subjects, worker: Worker) -> None:
    tried = list(islice(endless(subjects, SEED), TRIED))
    assert {kind for kind, _ in tried} == SOURCES.keys()
    failed = [(case.json(), faults) for _, case in tried if (faults := try_case(case, subjects, worker))]
    assert not failed


def test_a_case_is_the_same_after_it_was_written_and_read(subjects: Subjects) -> None:
    for _, case in islice(endless(subjects, SEED), 60):
        assert case_of(case.json()) == case


def test_the_same_seed_makes_the_same_cases(subjects: Subjects) -> None:
    once, again = (list(islice(endless(subjects, SEED), 60)) for _ in range(2))
    assert once == again
