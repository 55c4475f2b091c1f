"""Temperatures and clocks, as Linux tells of them to everybody."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from sinkprune.runtime.power import ROOT

_ZONES = "sys/class/thermal/thermal_zone*"
_CPU_CLOCKS = "sys/devices/system/cpu/cpufreq/policy*/scaling_cur_freq"
# A Jetson's GPU: 17000000.gpu or .ga10b on Orin, gpu-gpc-0 and on on Thor.
_GPU_CLOCKS = ("sys/class/devfreq/*gpu*/cur_freq", "sys/class/devfreq/*.ga10b/cur_freq")


class Conditions(NamedTuple):
    """What a machine is like at one moment."""

    temperatures: Mapping[str, float]
    """Degrees Celsius, by the place's name."""
    clocks: Mapping[str, float]
    """MHz of `cpu` and, on a Jetson, `gpu`: the mean of the clusters."""


def read_conditions(root: Path = ROOT) -> Conditions:
    """The conditions of now, by the system's files below `root`; what it does not tell is left out."""
    temperatures: dict[str, float] = {}
    for zone in sorted(root.glob(_ZONES)):
        millidegrees = _number(zone / "temp")
        if millidegrees is not None:
            temperatures[_new_name(_text(zone / "type") or zone.name, temperatures)] = millidegrees / 1e3
    units = {"cpu": (_mean(root, (_CPU_CLOCKS,)), 1e3), "gpu": (_mean(root, _GPU_CLOCKS), 1e6)}
    clocks = {unit: value / of_mhz for unit, (value, of_mhz) in units.items() if value is not None}
    return Conditions(temperatures, clocks)


def _mean(root: Path, patterns: tuple[str, ...]) -> float | None:
    found = [_number(path) for pattern in patterns for path in root.glob(pattern)]
    values = [value for value in found if value is not None]
    return fmean(values) if values else None


def _new_name(name: str, taken: Mapping[str, object]) -> str:
    """`name`, or where it is taken the first of `name 2`, `name 3`, ... that is not."""
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name} {number}"
    return free


def _number(path: Path) -> float | None:
    try:
        return float(_text(path) or "")
    except ValueError:
        return None


def _text(path: Path) -> str | None:
    """What a file says; None where it is not there, or the device behind it is asleep."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
