"""`make fuzz`: tries wrong inputs until Ctrl-C, or for SECONDS; with --replay, saved cases again.

Cases run on several workers at once, with a line of progress. The first failing case of each cause is saved.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from fuzz.inputs.cases import Case, JsonEdit, case_of
from fuzz.inputs.sources import SOURCES, corpus, endless
from fuzz.subjects import FAMILIES, Subjects, make_families
from fuzz.verdict import Fault, try_case
from fuzz.worker import Worker

_CLEAR = "\r\x1b[K" if sys.stdout.isatty() else ""
_MESSAGE = re.compile(r": .*? \[(?=File)", re.DOTALL)
_QUOTED, _NUMBER = re.compile(r"'[^']*'"), re.compile(r"0x[0-9a-f]+|-?[0-9]+(\.[0-9]+)?")


@dataclass
class Campaign:
    """The cases that were tried, and their faults."""

    started: float = field(default_factory=time.monotonic)
    tried: Counter[str] = field(default_factory=Counter)
    """The number of cases of each kind."""
    seconds: dict[str, float] = field(default_factory=dict)
    """The time of all cases of each kind."""
    faults: dict[str, Fault] = field(default_factory=dict)
    """The first fault of each cause."""
    counts: Counter[str] = field(default_factory=Counter)
    """The number of faults of each cause."""

    def line(self) -> str:
        """Return the progress in one line."""
        seconds, tried = time.monotonic() - self.started, self.tried.total()
        return (
            f"{tried} cases in {seconds:.0f} s, {tried / max(seconds, 1e-9):.1f} a second; "
            f"{self.counts.total()} failed, of {len(self.faults)} causes"
        )


def run_campaign(
    cases: Iterator[tuple[str, Case]], subjects: Subjects, workers: list[Worker], seconds: float, save_to: Path | None
) -> Campaign:
    """Try `cases` until their end, for `seconds` or until Ctrl-C, and save those that fail in `save_to`."""
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
                campaign.tried[kind] += 1
                campaign.seconds[kind] = campaign.seconds.get(kind, 0.0) + time.monotonic() - began
                for fault in faults:
                    _add_fault(campaign, case, fault, save_to)

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


def _add_fault(campaign: Campaign, case: Case, fault: Fault, save_to: Path | None) -> None:
    if fault.kind == "answer":
        # Each field that changes an answer is a cause of its own.
        cause = f"answer: {[change.path for change in case.changes if isinstance(change, JsonEdit)]}"
    else:
        # The kind and the place, without messages, names, numbers and values.
        words = _QUOTED.sub("_", _MESSAGE.sub(" [", fault.detail))
        cause = f"{fault.kind}: {_NUMBER.sub('#', words)[:160]}"
    campaign.counts[cause] += 1
    if cause not in campaign.faults:
        campaign.faults[cause] = fault
        if save_to is not None:
            path = _save(case, fault, save_to)
            sys.stdout.write(f"{_CLEAR}{fault.kind}: {fault.detail[:300]}\n    python -m fuzz --replay {path}\n")


def _save(case: Case, fault: Fault, folder: Path) -> Path:
    """Write a case as a line of the corpus to a new file, and its fault to another. Return the path of the case."""
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


def replay(paths: list[str]) -> int:
    """Try saved cases or lines of the corpus again."""
    lines = [(path, line) for path in paths for line in Path(path).read_text(encoding="utf-8").splitlines()]
    cases = [(path, case_of(json.loads(line))) for path, line in lines]
    families = sorted({case.subject.partition(":")[2] for _, case in cases})
    failed = 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, Worker() as worker:
        subjects = Subjects(make_families(Path(folder) / "subjects", families), families)
        for path, case in cases:
            faults = try_case(case, subjects, worker)
            failed += bool(faults)
            result = "; ".join(f"{fault.kind}: {fault.detail}" for fault in faults) or "as it should be"
            sys.stdout.write(f"{path} {json.dumps(case.json())[:120]}\n    {result}\n")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    add = parser.add_argument
    add("--seconds", type=float, default=float("inf"), help="end after this time (default: at Ctrl-C)")
    add("--seed", type=int, default=random.SystemRandom().randrange(2**32), help="repeat the cases of a run")
    add(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="calls at a time (default: as many as cores)",
    )
    add("--kinds", nargs="+", default=list(SOURCES), choices=list(SOURCES), help="kinds of cases (default: all)")
    add("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES, help="model families (default: all)")
    add("--failures", type=Path, default=Path("fuzz-failures"), help="where failing cases are saved")
    add("--no-corpus", action="store_true", help="do not begin with the cases that were found before")
    add("--replay", nargs="+", metavar="FILE", help="try saved cases or lines of the corpus again, and nothing else")
    options = parser.parse_args()
    if options.replay:
        return replay(options.replay)
    sys.stdout.write(f"seed {options.seed}; Ctrl-C ends. Making checkpoints, bundles and engines ...\n")
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fuzz-")))
        subjects = Subjects(make_families(place / "subjects", options.families), options.families)
        workers = [stack.enter_context(Worker()) for _ in range(options.workers)]
        known = (
            [] if options.no_corpus else [(name, case) for name, case in corpus() if case.subject in subjects.names]
        )
        cases = chain((("corpus", case) for _, case in known), endless(subjects, options.seed, options.kinds))
        campaign = run_campaign(cases, subjects, workers, options.seconds, options.failures)
    sys.stdout.write("\n")
    for kind, tried in campaign.tried.items():
        sys.stdout.write(f"  {kind}: {tried}, {campaign.seconds[kind] / tried * 1e3:.0f} ms each\n")
    for cause, fault in campaign.faults.items():
        sys.stdout.write(f"{campaign.counts[cause]} x {fault.kind}: {fault.detail[:200]}\n")
    sys.stdout.write(f"seed {options.seed}: {campaign.line()}\n")
    return 1 if campaign.faults else 0


if __name__ == "__main__":
    sys.exit(main())
