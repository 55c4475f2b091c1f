"""The free memory of the system, which CPU and GPU share on boards."""

from __future__ import annotations

import resource
from pathlib import Path

from sinkprune.contract.system.control_groups import ROOT, ControlGroup, control_groups

_MEMINFO = Path("proc/meminfo")
_STATM = Path("/proc/self/statm")


def available_bytes(root: Path = ROOT) -> int:
    """Return the bytes of memory that this process can take without swapping; 0 if they are unknown.

    The least of three: the memory that the kernel can make available, the rest of the limit of each control group of
    the process, and the rest of the process's own limit (`ulimit -v`). The system's files are read below `root`.
    """
    groups = [_of_group(group) for group in control_groups("memory", root)]
    known = [count for count in (_of_machine(root), *groups, _of_process()) if count is not None]
    return max(0, min(known, default=0))


def _of_machine(root: Path) -> int | None:
    try:
        lines = (root / _MEMINFO).read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _of_group(group: ControlGroup) -> int | None:
    """Return the bytes left of the limit of `group`, or None without a limit. Cached files count as free."""
    if group.version == 2:
        # Over "high" the kernel takes pages back until the process nearly stands still.
        limits, (current, cached, shared) = ["memory.max", "memory.high"], ("memory.current", "file", "shmem")
    else:
        limits = ["memory.limit_in_bytes"]
        current, cached, shared = "memory.usage_in_bytes", "total_cache", "total_shmem"
    most = [number for file in limits for number in group.numbers(file) if number is not None]
    used = [number for number in group.numbers(current) if number is not None]
    if not most or not used:
        return None
    parts = group.named("memory.stat")
    # Shared memory is counted as cached, and only swapping gives it back.
    return min(most) - used[0] + max(0, parts.get(cached, 0) - parts.get(shared, 0))


def _of_process() -> int | None:
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY:
        return None
    try:
        return most - int(_STATM.read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return None
