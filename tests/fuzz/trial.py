"""Tries one case: copies the files, changes them, runs the commands, and judges the outcome."""

from __future__ import annotations

import fnmatch
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fuzz.inputs.cases import Case, JsonEdit
from fuzz.inputs.mutations import document_of, value_at
from fuzz.subjects import Subjects, call_of
from fuzz.verdict import Fault, faults_of, files_of
from fuzz.workers import Worker

MAY_CHANGE_ANSWERS = (
    *("language_model.rope_theta", "language_model.rope_factor", "vision.rope_theta"),
    *("processor.rescale_factor", "processor.resample"),
    *("processor.image_mean.*", "processor.image_std.*", "processor.size.*", "processor.image_grid_pinpoints.*"),
)
"""Patterns of fields of manifests that may change answers, unless the bundle is pinned by its sha256."""

_MANIFESTS = ("bundle/bundle.json", "engines/engines.json")


def try_case(case: Case, subjects: Subjects, worker: Worker) -> list[Fault]:
    """Return the faults of `case`; none if the commands accept or reject it as they should."""
    with _case_folder() as folder:
        honest = subjects.honest(case.subject, worker, folder)
    with _case_folder() as folder:
        subjects.copy(case.subject, folder)
        case.apply(folder)
        for step, usual in zip(subjects[case.subject].steps, honest, strict=True):
            before = files_of(folder)
            outcome = worker(call_of(step, folder, usual))
            same = keeps_answers(case, subjects)
            faults = faults_of(outcome, usual, before, files_of(folder), step.output, same_answer=same)
            if faults or outcome.code != 0:
                return faults
    return []


def keeps_answers(case: Case, subjects: Subjects) -> bool:
    """Return whether the commands must reject the case or give the answer of the unchanged files."""
    if case.subject.startswith("pinned:"):
        return True
    edits = [change for change in case.changes if isinstance(change, JsonEdit)]
    if len(edits) != len(case.changes) or not all(edit.file in _MANIFESTS for edit in edits):
        return False
    return not all(_may_change(edit, document_of(subjects.folder(case.subject) / edit.file)) for edit in edits)


def _may_change(edit: JsonEdit, document: Any) -> bool:
    """Return whether the field may change answers, and the new value is of the right type."""
    field = ".".join(map(str, edit.path))
    if not any(fnmatch.fnmatchcase(field, pattern) for pattern in MAY_CHANGE_ANSWERS):
        return False
    if edit.delete:
        # A list may be shorter; an object would lack a field.
        return isinstance(edit.path[-1], int)
    usual = value_at(document, edit.path)
    number = type(usual) in (int, float) and type(edit.value) in (int, float)
    return number or type(usual) is type(edit.value)


@contextmanager
def _case_folder() -> Iterator[Path]:
    """Yield a folder for one case, with an empty home folder in it."""
    folder = Path(tempfile.mkdtemp()).resolve()
    try:
        (folder / "home").mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
