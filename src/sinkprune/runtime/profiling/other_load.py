"""The load of other programs while times are measured."""

from __future__ import annotations

import os
from pathlib import Path

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
