"""The memory of the system, which boards share between CPU and GPU."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")


def available_bytes() -> int:
    """Bytes of the machine's memory that its kernel can make available without swapping; 0 where it does not tell."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
