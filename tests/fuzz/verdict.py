"""Tries one case: copies the files, changes them, runs the commands, and judges what no input may cause."""

from __future__ import annotations

import fnmatch
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz.inputs.cases import Case, JsonEdit
from fuzz.inputs.mutations import document_of, value_at
from fuzz.subjects import Subjects, call_of
from fuzz.worker import MEMORY_BYTES, Outcome, Worker

_OUT_OF_MEMORY = re.compile(
    r"MemoryError|bad_alloc|(out of|not enough|allocate|too little) (\w+ )*(memory|address)", re.IGNORECASE
)
_OURS = re.compile(r"tests/fuzz/worker\.py|<frozen")
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
_MESSAGE_CHARACTERS = 3000
"""Longer messages repeat the input instead of naming the fault."""
_KEPT = "engines are whole and wait in"
# Messages of sinkprune-export about budgets and the size of images, and of libtiff about damaged TIFFs, which Pillow
# cannot suppress.
_ALLOWED = re.compile(
    r"left out: |images: up to |(ZIPDecode|LZWDecode|JPEG\w*|Fax\w+|PackBitsDecode|TIFF\w*|tempfile\.tif): |"
    r".*: the model sees .* --fit pad shows it all( \(docs/pictures\.md\))?\.$"
)


@dataclass(frozen=True)
class Fault:
    """A fault of an outcome: its `kind`, one of a few, and a `detail` for people."""

    kind: str
    detail: str


Files = Mapping[str, tuple[int, int]]
"""Size and time of every file below a folder, by its path relative to it."""


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Return all files and folders below `folder`, without following links."""
    found = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        # The time of a folder changes with its content.
        found[str(path.relative_to(folder))] = (-1, 0) if path.is_dir() else (status.st_size, status.st_mtime_ns)
    return found


def faults_of(
    outcome: Outcome, honest: Outcome, before: Files, after: Files, output: str | None, *, same_answer: bool
) -> list[Fault]:
    """Return all faults of `outcome`; none if the command accepted or rejected the input as it should.

    `honest` is the outcome of the unchanged input. `output` is the file or folder that a completed command may write.
    With `same_answer` the answer must be that of `honest`.
    """
    if outcome.timed_out:
        return [Fault("hang", f"not done after {outcome.seconds:.1f} s; {_last_line(outcome.stderr)}")]
    faults = [*_end(outcome), *_memory(outcome, honest), *_files(outcome, before, after, output)]
    faults += [Fault("escape", what) for what in outcome.seen]
    if same_answer and outcome.code == 0 and outcome.answer != honest.answer:
        faults.append(Fault("answer", f"{outcome.answer}, honestly {honest.answer}"))
    return faults


def _end(outcome: Outcome) -> list[Fault]:
    text = outcome.stderr
    if outcome.code < 0:
        return [Fault("abort", f"signal {-outcome.code}; {_last_line(text)}")]
    if "Traceback" in text or outcome.code not in (0, 2):
        return [Fault("traceback", f"exit code {outcome.code}; {_last_line(text)}")]
    faults = []
    if "panicked" in text:
        faults.append(Fault("panic", _last_line(text)))
    lines = [line for line in text.splitlines() if not _ALLOWED.match(line)]
    good = len(lines) == 1 and lines[0].startswith("error: ") if outcome.code == 2 else not lines
    if not good:
        faults.append(Fault("noise", repr(text[:300])))
    if _CONTROL.search(text):
        faults.append(Fault("control characters", repr(text[:300])))
    if len(text) > _MESSAGE_CHARACTERS:
        faults.append(Fault("long message", f"{len(text)} characters: {text[:100]}"))
    return faults


def _memory(outcome: Outcome, honest: Outcome) -> list[Fault]:
    more = outcome.peak_bytes - honest.peak_bytes
    if more > MEMORY_BYTES:
        return [Fault("memory", f"{more >> 20} MB more than the honest input")]
    # The process needed more than its limit.
    if _OUT_OF_MEMORY.search(outcome.stderr):
        return [Fault("memory", _last_line(outcome.stderr))]
    return []


def _files(outcome: Outcome, before: Files, after: Files, output: str | None) -> list[Fault]:
    allowed = output if outcome.code == 0 else None
    # A build that fails keeps engines for the next build, and reports it.
    if _KEPT in outcome.stderr:
        allowed = f".{output}.building"
    changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    strays = sorted(name for name in changed if allowed is None or name.split("/")[0] != allowed)
    return [Fault("stray file", ", ".join(strays[:5]))] if strays else []


def _last_line(text: str) -> str:
    """Return the last line of `text`, and the places of a traceback or a dump of the stack."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return "no output"
    places = [line for line in lines if line.startswith("File ") and not _OURS.search(line)]
    # The innermost call is the first of a dump of the stack, and the last of a traceback.
    dumped = "most recent call first" in text
    places = places[:3] if dumped else places[-1:]
    messages = [line for line in lines if not line.startswith(("File ", "Extension modules"))]
    return " ".join([messages[-1][:300] if messages else "", *(f"[{place}]" for place in places)])


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
