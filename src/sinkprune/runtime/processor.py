"""The processor: its name, and the instructions that it has."""

from __future__ import annotations

import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_CHOOSING = {"fma", "f16c", "sme", "sme2", "i8mm", "bf16", "asimddp", "asimdhp", "fphp"}
"""With those of `_FAMILIES`, the instructions by which engine libraries choose their code and layouts."""
_FAMILIES = ("avx", "amx", "sve")


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
