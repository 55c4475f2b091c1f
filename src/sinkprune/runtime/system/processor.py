"""This machine's processor, as the system tells of it."""

from __future__ import annotations

import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_CHOOSING = {"fma", "f16c", "sme", "sme2", "i8mm", "bf16", "asimddp", "asimdhp", "fphp"}
"""Beside those of these families, the instructions that engine libraries choose their code and layouts by."""
_FAMILIES = ("avx", "amx", "sve")


def machine() -> str:
    """The kind of processor, e.g. `x86_64`."""
    return platform.machine()


def processor_name(cpuinfo: Path = _CPUINFO) -> str:
    """The processor's name."""
    return _told("model name", cpuinfo) or platform.processor() or platform.machine()


def instructions(cpuinfo: Path = _CPUINFO) -> str:
    """The sets of instructions that matter to engine libraries, with blanks between; empty where nothing tells."""
    names = (_told("flags", cpuinfo) or _told("Features", cpuinfo) or "").split()
    return " ".join(sorted(name for name in names if name in _CHOOSING or name.startswith(_FAMILIES)))


def _told(field: str, cpuinfo: Path) -> str | None:
    """What the system says of the first processor's `field`; None where it does not."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), None)
