"""`make fuzz`: wrong inputs until Ctrl-C, or for as many seconds as SECONDS says."""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

from fuzz.campaign import run_campaign
from fuzz.inputs.sources import SOURCES, corpus, endless
from fuzz.subjects import FAMILIES, Subjects, make_families
from fuzz.workers import Worker


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    add = parser.add_argument
    add("--seconds", type=float, default=float("inf"), help="end after as many (default: at Ctrl-C)")
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
    options = parser.parse_args()
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
    for kind, tried in campaign.tried_by_kind.items():
        sys.stdout.write(f"  {kind}: {tried}, {campaign.seconds_by_kind[kind] / tried * 1e3:.0f} ms each\n")
    for failure in campaign.failures.values():
        sys.stdout.write(f"{failure.count} x {failure.fault.kind}: {failure.fault.detail[:200]}\n")
    sys.stdout.write(f"seed {options.seed}: {campaign.line()}\n")
    return 1 if campaign.failures else 0


if __name__ == "__main__":
    sys.exit(main())
