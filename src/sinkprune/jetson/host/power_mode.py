"""How fast a machine may run: nvpmodel's power mode on a Jetson, and the clocks of CPU and GPU on any Linux."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from sinkprune.jetson.host.system_files import SystemFiles

_STATUS = "var/lib/nvpmodel/status"
_MODE = re.compile(r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=([^\s>]+)")
_DEFAULT = re.compile(r"<\s*PM_CONFIG\s+DEFAULT=(\d+)")
_CPU = "sys/devices/system/cpu/cpu0/cpufreq"
_GPUS = ("sys/class/devfreq/*gpu*", "sys/class/devfreq/*.ga10b", "sys/class/devfreq/*.gb10b")


@dataclass(frozen=True)
class PowerMode:
    """What nvpmodel was last told, and what it knows."""

    id: int
    name: str | None
    """None where nvpmodel's configuration does not name it."""
    modes: dict[str, int]
    """The board's modes and their numbers."""

    @property
    def fastest(self) -> tuple[str, int] | None:
        """The mode without limits and its number; None where the board has none."""
        name = fastest_mode(self.modes)
        return (name, self.modes[name]) if name else None

    @property
    def is_fastest(self) -> bool:
        """Whether the board is in it, or has none."""
        return self.fastest is None or self.fastest[1] == self.id


@dataclass(frozen=True)
class ModeFacts:
    """A power mode of a board, as far as it is known."""

    name: str
    number: int | None
    """What `nvpmodel -m` takes; None for a board that is elsewhere."""
    watts: int | None
    """The power budget in its name; None for a mode without one."""
    current: bool | None
    """Whether the board is in it; None for a board that is elsewhere."""
    bounds_hold: bool
    """Whether bounds and ranges are of this mode. Others are slower: their clocks are in no data here."""


@dataclass(frozen=True)
class Clock:
    """A clock in MHz; None for what the system does not tell."""

    now: int | None
    least: int | None
    """The least that it may fall to: the most, where jetson_clocks holds it."""
    most: int | None
    governor: str | None


def read_power_mode(files: SystemFiles) -> PowerMode | None:
    """The power mode; None where there is no nvpmodel, or its status may not be read.

    Until a mode was set once, there is no status and the configuration's default is what holds.
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


def mode_facts(found: PowerMode | None, names: tuple[str, ...]) -> tuple[ModeFacts, ...]:
    """Return the power modes that nvpmodel has, or else those of these `names`; datasheets are of the fastest."""
    modes: dict[str, int | None] = dict(found.modes) if found and found.modes else dict.fromkeys(names)
    watts = {name: int(budget[1]) if (budget := re.search(r"(\d+)W", name)) else None for name in modes}
    unlimited = fastest_mode(modes)
    fastest = unlimited or max(modes, key=lambda name: watts[name] or 0, default=None)
    return tuple(
        ModeFacts(name, number, watts[name], number == found.id if found and found.modes else None, name == fastest)
        for name, number in sorted(modes.items(), key=lambda mode: watts[mode[0]] or 10**9)
    )


def fastest_mode(names: Iterable[str]) -> str | None:
    """Return the mode without limits: MAXN_SUPER, which is faster than MAXN where a board has both; None without."""
    return max((name for name in names if name.startswith("MAXN")), key=len, default=None)


def read_cpu_clock(files: SystemFiles) -> Clock | None:
    """The first core's clock; None where the system tells of none."""
    now, least, most = (_mhz(files.number(f"{_CPU}/scaling_{what}_freq"), 1000) for what in ("cur", "min", "max"))
    governor = files.line(f"{_CPU}/scaling_governor")
    return Clock(now, least, most, governor) if most or governor else None


def read_gpu_clock(files: SystemFiles) -> Clock | None:
    """A Jetson's GPU clock; None where the system tells of none."""
    for folder in (path for pattern in _GPUS for path in files.matching(pattern)):
        now, least, most = (_mhz(files.number(f"{folder}/{what}_freq"), 1_000_000) for what in ("cur", "min", "max"))
        if most:
            return Clock(now, least, most, files.line(f"{folder}/governor"))
    return None


def _mhz(value: int | None, per_mhz: int) -> int | None:
    return None if value is None else round(value / per_mhz)
