"""The machine that runs a model: processor, cores, heap, and turns of threads."""

from __future__ import annotations

import ctypes
import os
import platform
from collections import deque
from math import ceil
from pathlib import Path
from threading import Lock, get_ident

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


_CPUINFO = Path("/proc/cpuinfo")
_CHOOSING = {"fma", "f16c", "sme", "sme2", "i8mm", "bf16", "asimddp", "asimdhp", "fphp"}
"""With those of `_FAMILIES`, the instructions by which engine libraries choose their code and layouts."""
_FAMILIES = ("avx", "amx", "sve")


def architecture() -> str:
    """Return the architecture of the processor, e.g. `x86_64`."""
    return platform.machine()


def processor_name(cpuinfo: Path = _CPUINFO) -> str:
    """Return the processor's name."""
    return _field("model name", cpuinfo) or platform.processor() or platform.machine()


def instructions(cpuinfo: Path = _CPUINFO) -> str:
    """Return the instruction sets that matter to engine libraries, separated by blanks; empty where unknown."""
    names = (_field("flags", cpuinfo) or _field("Features", cpuinfo) or "").split()
    return " ".join(sorted(name for name in names if name in _CHOOSING or name.startswith(_FAMILIES)))


def _field(field: str, cpuinfo: Path) -> str | None:
    """Return a field of the first processor in `cpuinfo`; None where it is missing."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), None)


class Turns:
    """A reentrant lock for `with` blocks, first come, first served.

    `threading.RLock` is not fair. A thread that releases it and acquires it again may overtake waiting threads, so a
    long answer could block a short one.
    """

    def __init__(self) -> None:
        self._changes = Lock()
        self._waiting: deque[tuple[int, Lock]] = deque()
        self._holder: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        thread = get_ident()
        with self._changes:
            if self._holder in (None, thread):
                self._holder = thread
                self._depth += 1
                return
            called = Lock()
            called.acquire()
            self._waiting.append((thread, called))
        try:
            called.acquire()
        except BaseException:
            # Ctrl-C while the thread waited, or just when its turn came.
            with self._changes:
                if (thread, called) in self._waiting:
                    self._waiting.remove((thread, called))
                else:
                    self._pass_on()
            raise

    def __exit__(self, *raised: object) -> None:
        with self._changes:
            self._depth -= 1
            if not self._depth:
                self._pass_on()

    def _pass_on(self) -> None:
        self._holder, self._depth = None, 0
        if self._waiting:
            self._holder, called = self._waiting.popleft()
            self._depth = 1
            called.release()


LOADED = 0.25
"""Measured times are doubtful if other programs took a larger share of the processors meanwhile."""
_STAT = Path("/proc/stat")
_FIELDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
_UNUSED = (3, 4)
"""The places of `idle` and `iowait` among them."""


class OtherLoad:
    """Measures the share of processor time that other programs take, from its creation on.

    Counts the processors that this process may use. Reads `/proc/stat` (proc(5)): also in a container these are the
    times of the machine.
    """

    def __init__(self) -> None:
        self._began = _times()

    def share(self) -> float | None:
        """Return the share so far, from 0 to 1, or None where the system does not report it."""
        now = _times()
        if self._began is None or now is None:
            return None
        every, busy, own = (after - before for before, after in zip(self._began, now, strict=True))
        return min(1.0, max(0.0, (busy - own) / every)) if every > 0 else None


def _times() -> tuple[float, float, float] | None:
    """Return seconds since the start of the machine, over the usable processors: all, busy, and of this process."""
    try:
        names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        lines = [line.split() for line in _STAT.read_text().splitlines()]
        rows = [[int(count) for count in counts] for name, *counts in filter(None, lines) if name in names]
    except (AttributeError, OSError, ValueError):
        return None
    if not rows or any(len(row) < len(_FIELDS) for row in rows):
        return None
    scale, own = os.sysconf("SC_CLK_TCK"), os.times()
    every = sum(sum(row[: len(_FIELDS)]) for row in rows)
    unused = sum(row[place] for row in rows for place in _UNUSED)
    return every / scale, (every - unused) / scale, own.user + own.system
