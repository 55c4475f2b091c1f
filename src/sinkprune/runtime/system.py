"""The machine that runs a model: cores and heap."""

from __future__ import annotations

import ctypes
import os
from math import ceil
from pathlib import Path

from sinkprune.contract.memory import ROOT, ControlGroup, control_groups


def bound_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores(root: Path = ROOT) -> int:
    """Return how many cores this process may use at once, at least 1.

    That is the least of the cores it is bound to and of the CPU time that each of its control groups gets, in whole
    cores rounded up: 1.5 cores are 2 threads. The system's files are read below `root`.
    """
    bound = bound_cores()
    quotas = [quota for group in control_groups("cpu", root) if (quota := _quota(group)) is not None]
    return max(1, min(bound, *map(ceil, quotas))) if quotas else bound


def _quota(group: ControlGroup) -> float | None:
    """The CPU time that `group` may take in a period, over that period; None without a limit."""
    files = ("cpu.max",) if group.version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    numbers = [number for file in files for number in group.numbers(file)]
    if len(numbers) != 2 or not numbers[0] or not numbers[1]:
        return None
    return numbers[0] / numbers[1]


def trim_heap() -> None:
    """Return freed memory to the system, where the C library can: glibc keeps free pieces between pieces in use.

    After loading int4 weights this is up to a third of the process.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
