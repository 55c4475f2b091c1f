"""A program that kills processes while they add a budget to a bundle, and reads the bundle after each.

`kill_adding.py BUNDLE` kills at system calls, some way apart, until a process is not killed. It prints a JSON list of
the budgets after each process. It is a program because it forks.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from sinkprune.calibration.plans import add_budget
from sinkprune.contract.budgets import Budget, Share
from sinkprune.contract.bundle import read_bundle
from support.programs.kill_replacing import forked, killed_at_call

BUDGET = Budget(Share(10, 64), Share(5, 64), (Share(9, 64),))
APART = 29


def add(root: Path) -> None:
    bundle = read_bundle(root)
    if "ours" not in bundle.manifest.budgets:
        add_budget(bundle, "ours", BUDGET, bundle.manifest.cut_after[:1])


def main() -> None:
    root, found, number, killed = Path(sys.argv[1]), [], 1, True
    while killed:
        killed = forked(partial(killed_at_call, number, partial(add, root)))
        bundle = read_bundle(root)
        bundle.verify()
        found.append([*bundle.manifest.budgets])
        number += APART
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
