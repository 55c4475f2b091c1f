"""`make fuzz`: tries wrong inputs until Ctrl-C, or for SECONDS."""

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
    for kind, tried in campaign.tried.items():
        sys.stdout.write(f"  {kind}: {tried}, {campaign.seconds[kind] / tried * 1e3:.0f} ms each\n")
    for cause, fault in campaign.faults.items():
        sys.stdout.write(f"{campaign.counts[cause]} x {fault.kind}: {fault.detail[:200]}\n")
    sys.stdout.write(f"seed {options.seed}: {campaign.line()}\n")
    return 1 if campaign.faults else 0


if __name__ == "__main__":
    sys.exit(main())
