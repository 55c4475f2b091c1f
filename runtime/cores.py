"""The cores this process may compute on."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """How many there are, where the system tells; else all of the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
