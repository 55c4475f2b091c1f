"""The memory of the system, which boards share between CPU and GPU."""

from __future__ import annotations

import resource
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_STATM = Path("/proc/self/statm")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Bytes of memory that this process can take without swapping; 0 where the system does not tell.

    That is what the kernel can make available, what is left of the container's limit, or of the process's own
    (`ulimit -v`): the least of them.
    """
    known = [count for count in (_of_machine(), _of_container(), _of_process()) if count is not None]
    return max(0, min(known, default=0))


def _of_machine() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _of_container() -> int | None:
    """By cgroups of version 2; what files are cached in can be had again."""
    try:
        most, taken = (_CGROUP / "memory.max").read_text(), int((_CGROUP / "memory.current").read_text())
        kept = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return None if most.strip() == "max" else int(most) - taken + int(kept["file"])
    except (OSError, ValueError, KeyError):
        return None


def _of_process() -> int | None:
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY:
        return None
    try:
        return most - int(_STATM.read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return None
