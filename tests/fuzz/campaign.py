"""Trying cases on several workers at once, with a line of progress; what fails is saved, once for each cause."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from fuzz.inputs.cases import Case, JsonEdit
from fuzz.subjects import Subjects
from fuzz.trial import try_case
from fuzz.verdict import Fault
from fuzz.workers import Worker

_CLEAR = "\r\x1b[K" if sys.stdout.isatty() else ""
_MESSAGE = re.compile(r": .*? \[(?=File)", re.DOTALL)
_QUOTED, _NUMBER = re.compile(r"'[^']*'"), re.compile(r"0x[0-9a-f]+|-?[0-9]+(\.[0-9]+)?")


@dataclass
class Failure:
    """Cases that fail in the same way: the first of them, and how many there were."""

    kind: str
    case: Case
    fault: Fault
    count: int = 1


@dataclass
class Campaign:
    """What was tried so far, and what came of it."""

    started: float = field(default_factory=time.monotonic)
    tried: int = 0
    failures: dict[str, Failure] = field(default_factory=dict)
    """By what the fault looks like, names and numbers aside."""
    seconds_by_kind: dict[str, float] = field(default_factory=dict)
    tried_by_kind: dict[str, int] = field(default_factory=dict)

    def count(self, kind: str, seconds: float) -> None:
        """One more case of `kind` was tried, in so many seconds."""
        self.tried += 1
        self.tried_by_kind[kind] = self.tried_by_kind.get(kind, 0) + 1
        self.seconds_by_kind[kind] = self.seconds_by_kind.get(kind, 0.0) + seconds

    def line(self) -> str:
        seconds = time.monotonic() - self.started
        failed = sum(failure.count for failure in self.failures.values())
        return (
            f"{self.tried} cases in {seconds:.0f} s, {self.tried / max(seconds, 1e-9):.1f} a second; "
            f"{failed} failed, of {len(self.failures)} causes"
        )


def run_campaign(
    cases: Iterator[tuple[str, Case]], subjects: Subjects, workers: list[Worker], seconds: float, save_to: Path | None
) -> Campaign:
    """Try `cases` until there are no more, `seconds` are over or Ctrl-C is pressed; `save_to` gets what fails."""
    campaign, lock, end = Campaign(), threading.Lock(), threading.Event()

    def work(worker: Worker) -> None:
        while not end.is_set():
            with lock:
                kind, case = next(cases, (None, None))
            if kind is None or case is None:
                return
            began = time.monotonic()
            faults = try_case(case, subjects, worker)
            with lock:
                campaign.count(kind, time.monotonic() - began)
                for fault in faults:
                    _note(campaign, kind, case, fault, save_to)

    with ThreadPoolExecutor(len(workers)) as pool:
        working = {pool.submit(work, worker) for worker in workers}
        try:
            while working and time.monotonic() - campaign.started < seconds:
                done, working = wait(working, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
                _show(campaign)
        except KeyboardInterrupt:
            pass
        finally:
            end.set()
        for future in working:
            future.result()
    _show(campaign)
    return campaign


def signature(fault: Fault) -> str:
    """What faults of one cause have in common: names, numbers and values are left out."""
    # Of what was raised or hung, the kind and the place; not the message.
    words = _QUOTED.sub("_", _MESSAGE.sub(" [", fault.detail))
    return f"{fault.kind}: {_NUMBER.sub('#', words)[:160]}"


def _note(campaign: Campaign, kind: str, case: Case, fault: Fault, save_to: Path | None) -> None:
    # Of what changed an answer, each field is a cause of its own.
    fields = [change.path for change in case.changes if isinstance(change, JsonEdit)]
    cause = f"answer: {fields}" if fault.kind == "answer" else signature(fault)
    if cause in campaign.failures:
        campaign.failures[cause].count += 1
        return
    campaign.failures[cause] = Failure(kind, case, fault)
    if save_to is not None:
        path = save_case(case, fault, save_to)
        sys.stdout.write(f"{_CLEAR}{fault.kind}: {fault.detail[:300]}\n    python -m fuzz.replay {path}\n")


def save_case(case: Case, fault: Fault, folder: Path) -> Path:
    """Write a case as a line of the corpus into a file of its own, with what was wrong in another; its path."""
    line = json.dumps(case.json()) + "\n"
    name = f"{fault.kind.replace(' ', '-')}-{hashlib.sha256(line.encode()).hexdigest()[:10]}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.txt").write_text(f"{fault.kind}: {fault.detail}\n", encoding="utf-8")
    path = folder / f"{name}.json"
    path.write_text(line, encoding="utf-8")
    return path


def _show(campaign: Campaign) -> None:
    if sys.stdout.isatty():
        sys.stdout.write(f"{_CLEAR}{campaign.line()}")
        sys.stdout.flush()
