"""The power mode of a Jetson (nvpmodel), and the clocks of CPU and GPU on any Linux."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sinkprune.jetson.host.system_files import SystemFiles
from sinkprune.runtime.power.conditions import GPU_FOLDERS

_STATUS = "var/lib/nvpmodel/status"
_MODE = re.compile(r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=([^\s>]+)")
_DEFAULT = re.compile(r"<\s*PM_CONFIG\s+DEFAULT=(\d+)")
_CPU = "sys/devices/system/cpu/cpu0/cpufreq"


@dataclass(frozen=True)
class PowerMode:
    """The present mode of nvpmodel, and all its modes."""

    id: int
    name: str | None
    """None if nvpmodel's configuration does not name it."""
    modes: dict[str, int]
    """The numbers of the board's modes, by name."""

    @property
    def fastest(self) -> tuple[str, int] | None:
        """The mode without limits and its number; None if the board has none. MAXN_SUPER is faster than MAXN."""
        name = max((name for name in self.modes if name.startswith("MAXN")), key=len, default=None)
        return (name, self.modes[name]) if name else None

    @property
    def is_fastest(self) -> bool:
        """Whether the board is in its fastest mode, or has none."""
        return self.fastest is None or self.fastest[1] == self.id


@dataclass(frozen=True)
class ClockFrequency:
    """A clock in MHz. Unknown facts are None."""

    now: int | None
    least: int | None
    """The lower limit, which jetson_clocks raises to `most`."""
    most: int | None
    governor: str | None


def read_power_mode(files: SystemFiles) -> PowerMode | None:
    """Return the power mode; None without nvpmodel, or if its status cannot be read.

    Until a mode is set for the first time, there is no status and the configuration's default applies.
    """
    configuration = files.text("etc/nvpmodel.conf")
    status = files.text(_STATUS)
    modes = {name: int(number) for number, name in _MODE.findall(configuration or "")}
    found = re.search(r"pmode:(\d+)", status or "")
    if found is None and not any(path.startswith(f"/{_STATUS}") for path in files.unreadable):
        found = _DEFAULT.search(configuration or "")
    if found is None:
        return None
    number = int(found[1])
    return PowerMode(number, next((name for name, own in modes.items() if own == number), None), modes)


def read_cpu_clock(files: SystemFiles) -> ClockFrequency | None:
    """Return the first core's clock; None if unknown."""
    now, least, most = (_mhz(files.number(f"{_CPU}/scaling_{what}_freq"), 1000) for what in ("cur", "min", "max"))
    governor = files.line(f"{_CPU}/scaling_governor")
    return ClockFrequency(now, least, most, governor) if most or governor else None


def read_gpu_clock(files: SystemFiles) -> ClockFrequency | None:
    """Return a Jetson's GPU clock; None if unknown."""
    for folder in (path for pattern in GPU_FOLDERS for path in files.matching(pattern)):
        now, least, most = (_mhz(files.number(f"{folder}/{what}_freq"), 1_000_000) for what in ("cur", "min", "max"))
        if most:
            return ClockFrequency(now, least, most, files.line(f"{folder}/governor"))
    return None


def _mhz(value: int | None, per_mhz: int) -> int | None:
    return None if value is None else round(value / per_mhz)
