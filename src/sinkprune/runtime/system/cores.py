"""The cores this process may compute on."""

from __future__ import annotations

import os
from math import ceil
from pathlib import Path

from sinkprune.contract.system.control_groups import ROOT, ControlGroup, control_groups


def usable_cores(root: Path = ROOT) -> int:
    """Return how many cores this process may use at once, at least 1.

    That is the least of the cores it is bound to and of the CPU time that each of its control groups gets, in whole
    cores rounded up: 1.5 cores are 2 threads. The system's files are read below `root`.
    """
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for group in control_groups("cpu", root) if (quota := _quota(group)) is not None]
    return max(1, min(bound, *map(ceil, quotas))) if quotas else bound


def _quota(group: ControlGroup) -> float | None:
    """The CPU time that `group` may take in a period, over that period; None without a limit."""
    files = ("cpu.max",) if group.version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    numbers = [number for file in files for number in group.numbers(file)]
    if len(numbers) != 2 or not numbers[0] or not numbers[1]:
        return None
    return numbers[0] / numbers[1]
