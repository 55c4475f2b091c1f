"""Measures how busy other programs keep the machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_STAT = Path("/proc/stat")
_FIELDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
_UNUSED = ("idle", "iowait")


class _Times(NamedTuple):
    """Seconds since the start of the machine, added over the processors that this process may use."""

    all: float
    busy: float
    own: float
    """The part of `busy` that this process used."""


class OtherLoad:
    """Measures the share of processor time that other programs take, from its creation on.

    Counts the processors that this process may use. Reads `/proc/stat` (proc(5)): also in a container these are the
    times of the machine.
    """

    def __init__(self) -> None:
        """Begin to measure."""
        self._began = _times()

    def share(self) -> float | None:
        """Return the share so far, from 0 to 1, or None where the system does not report it."""
        now = _times()
        if self._began is None or now is None or now.all <= self._began.all:
            return None
        others = (now.busy - self._began.busy) - (now.own - self._began.own)
        return min(1.0, max(0.0, others / (now.all - self._began.all)))


def _times() -> _Times | None:
    try:
        names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        lines = [line.split() for line in _STAT.read_text().splitlines()]
        rows = [[int(count) for count in counts] for name, *counts in filter(None, lines) if name in names]
    except (AttributeError, OSError, ValueError):
        return None
    if not rows or any(len(row) < len(_FIELDS) for row in rows):
        return None
    scale, own = os.sysconf("SC_CLK_TCK"), os.times()
    ticks = {field: sum(row[place] for row in rows) for place, field in enumerate(_FIELDS)}
    every = sum(ticks.values())
    unused = sum(ticks[field] for field in _UNUSED)
    return _Times(every / scale, (every - unused) / scale, own.user + own.system)
