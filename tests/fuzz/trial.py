"""Trying one case: lay out, change, call, judge, clear away."""

from __future__ import annotations

import fnmatch
import shutil
import tempfile
from pathlib import Path

from fuzz.cases import Case, JsonEdit
from fuzz.subjects import Subjects, call_of
from fuzz.verdict import Fault, faults_of, files_of
from fuzz.workers import Worker

MAY_CHANGE_ANSWERS: tuple[str, ...] = ()
"""Fields of manifests, as patterns, that may change answers where the bundle was not pinned with its sha256."""


def try_case(case: Case, subjects: Subjects, worker: Worker) -> list[Fault]:
    """The faults of `case`, none where it is taken or refused as it should be."""
    with _place() as folder:
        honest = subjects.honest(case.subject, worker, folder)
    with _place() as folder:
        subjects.copy(case.subject, folder)
        case.apply(folder)
        for step, usual in zip(subjects[case.subject].steps, honest, strict=True):
            before = files_of(folder)
            outcome = worker(call_of(step, folder, usual))
            same = keeps_answers(case)
            faults = faults_of(outcome, usual, before, files_of(folder), step.output, same_answer=same)
            if faults or outcome.code != 0:
                return faults
    return []


def keeps_answers(case: Case) -> bool:
    """Whether the case must be refused or answered as if nothing had been changed."""
    if case.subject.startswith("pinned:"):
        return True
    edits = [change for change in case.changes if isinstance(change, JsonEdit)]
    manifests = [edit for edit in edits if edit.file in ("bundle/bundle.json", "engines/engines.json")]
    if not manifests or len(manifests) != len(case.changes):
        return False
    fields = [".".join(map(str, edit.path)) for edit in manifests]
    return not any(fnmatch.fnmatchcase(field, pattern) for field in fields for pattern in MAY_CHANGE_ANSWERS)


class _place(tempfile.TemporaryDirectory[str]):
    """A folder for one case, with an empty home folder in it."""

    def __enter__(self) -> Path:
        folder = Path(super().__enter__()).resolve()
        (folder / "home").mkdir()
        return folder

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self.name, ignore_errors=True)
        super().__exit__(*error)
