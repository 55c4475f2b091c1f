"""`make fuzz`: tries wrong inputs until Ctrl-C, or for SECONDS; with --replay, saved cases again.

Cases run on several workers at once. The first failing case of each cause is saved.
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
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from threading import Event, Lock

from fuzz.inputs.cases import Case, JsonEdit, case_of
from fuzz.inputs.sources import SOURCES, corpus, endless
from fuzz.subjects import FAMILIES, Subjects, make_families
from fuzz.verdict import Fault, try_case
from fuzz.worker import Worker

_MESSAGE = re.compile(r": .*? \[(?=File)", re.DOTALL)
_QUOTED, _NUMBER = re.compile(r"'[^']*'"), re.compile(r"0x[0-9a-f]+|-?[0-9]+(\.[0-9]+)?")


class Campaign:
    """Cases that are tried until their end, for some seconds or until Ctrl-C, and the causes of those that fail."""

    def __init__(self, cases: Iterator[tuple[str, Case]], subjects: Subjects, save_to: Path) -> None:
        self._cases, self._subjects, self._save_to = cases, subjects, save_to
        self._lock, self._ended = Lock(), Event()
        self.tried, self.causes = Counter[str](), Counter[str]()
        """The number of cases of each kind, and of faults of each cause."""

    def run(self, workers: list[Worker], seconds: float) -> None:
        with ThreadPoolExecutor(len(workers)) as pool:
            working = [pool.submit(self._work, worker) for worker in workers]
            end = time.monotonic() + seconds
            try:
                while time.monotonic() < end and not all(one.done() for one in working):
                    time.sleep(0.2)
            except KeyboardInterrupt:
                pass
            finally:
                self._ended.set()
        for one in working:
            one.result()

    def _work(self, worker: Worker) -> None:
        while not self._ended.is_set():
            with self._lock:
                found = next(self._cases, None)
            if found is None:
                return
            kind, case = found
            faults = try_case(case, self._subjects, worker)
            with self._lock:
                self.tried[kind] += 1
                for fault in faults:
                    self._add(case, fault)

    def _add(self, case: Case, fault: Fault) -> None:
        if fault.kind == "answer":
            # Each field that changes an answer is a cause of its own.
            cause = f"answer: {[change.path for change in case.changes if isinstance(change, JsonEdit)]}"
        else:
            # The kind and the place, without messages, names, numbers and values.
            words = _QUOTED.sub("_", _MESSAGE.sub(" [", fault.detail))
            cause = f"{fault.kind}: {_NUMBER.sub('#', words)[:160]}"
        self.causes[cause] += 1
        if self.causes[cause] == 1:
            path = _save(case, fault, self._save_to)
            sys.stdout.write(f"{fault.kind}: {fault.detail[:300]}\n    python -m fuzz --replay {path}\n")
            sys.stdout.flush()


def _save(case: Case, fault: Fault, folder: Path) -> Path:
    """Write a case as a line of the corpus to a new file, and its fault to another. Return the path of the case."""
    line = json.dumps(case.json()) + "\n"
    name = f"{fault.kind.replace(' ', '-')}-{hashlib.sha256(line.encode()).hexdigest()[:10]}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.txt").write_text(f"{fault.kind}: {fault.detail}\n", encoding="utf-8")
    path = folder / f"{name}.json"
    path.write_text(line, encoding="utf-8")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    add = parser.add_argument
    add("--seconds", type=float, default=float("inf"), help="end after this time (default: at Ctrl-C)")
    add("--seed", type=int, default=random.SystemRandom().randrange(2**32), help="repeat the cases of a run")
    add("--workers", type=int, default=len(os.sched_getaffinity(0)), help="calls at a time (default: one a core)")
    add("--kinds", nargs="+", default=list(SOURCES), choices=list(SOURCES), help="kinds of cases (default: all)")
    add("--failures", type=Path, default=Path("fuzz-failures"), help="where failing cases are saved")
    add("--replay", nargs="+", default=[], metavar="FILE", help="try saved cases or lines of the corpus only")
    options = parser.parse_args()
    lines = [(path, line) for path in options.replay for line in Path(path).read_text(encoding="utf-8").splitlines()]
    saved = [(path, case_of(json.loads(line))) for path, line in lines]
    families = sorted({case.subject.partition(":")[2] for _, case in saved}) or FAMILIES
    sys.stdout.write(f"seed {options.seed}; Ctrl-C ends. Making checkpoints, bundles and engines ...\n")
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fuzz-")))
        subjects = Subjects(make_families(place / "subjects", families), families)
        workers = [stack.enter_context(Worker()) for _ in range(options.workers)]
        known = (("corpus", case) for _, case in corpus())
        tried = iter(saved) if saved else chain(known, endless(subjects, options.seed, options.kinds))
        campaign = Campaign(tried, subjects, options.failures)
        campaign.run(workers, options.seconds)
    for cause, count in campaign.causes.items():
        sys.stdout.write(f"{count} x {cause}\n")
    sys.stdout.write(f"seed {options.seed}: {dict(campaign.tried)}; {len(campaign.causes)} causes of faults\n")
    return 1 if campaign.causes else 0


if __name__ == "__main__":
    sys.exit(main())
