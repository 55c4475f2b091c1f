"""The memory of the system, which boards share between CPU and GPU."""

from __future__ import annotations

import resource
from pathlib import Path

_ROOT = Path("/")
_MEMINFO = Path("proc/meminfo")
_STATM = Path("/proc/self/statm")
_CGROUP = Path("sys/fs/cgroup")


def available_bytes(root: Path = _ROOT) -> int:
    """Bytes of memory that this process can take without swapping; 0 where the system does not tell.

    That is what the kernel can make available, what is left of the container's limit, or of the process's own
    (`ulimit -v`): the least of them. The system's files are read below `root`.
    """
    known = [count for count in (_of_machine(root), _of_container(root), _of_process()) if count is not None]
    return max(0, min(known, default=0))


def _of_machine(root: Path) -> int | None:
    try:
        lines = (root / _MEMINFO).read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _of_container(root: Path) -> int | None:
    """By cgroups of version 2; what files are cached in can be had again."""
    group = root / _CGROUP
    try:
        most, taken = (group / "memory.max").read_text(), int((group / "memory.current").read_text())
        kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
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
