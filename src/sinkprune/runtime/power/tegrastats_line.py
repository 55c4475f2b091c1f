"""One line of `tegrastats`, as JetPack 5 to 7 print them on Orin and Thor. It has no version: all forms are taken.

    RAM 3452/7620MB (lfb 25x4MB) SWAP 1518/16384MB (cached 174MB) CPU [1%@1420,off] EMC_FREQ 43%@2133
    GR3D_FREQ 63%@[621] NVDEC off cpu@50.031C/50.5C VDD_IN 4824mW/4824mW/4824mW VDD_SOC 1475mW/1475mW/1475mW

Of a rail's values the first is of now; behind it come the mean since `tegrastats` was started, and from JetPack 7.2
on the maximum.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from statistics import fmean
from typing import NamedTuple

TOTALS = (
    ("VIN",),
    ("VDD_IN",),
    ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"),
    ("VDD_GPU", "VDD_CPU_SOC_MSS", "VIN_SYS_5V0"),
)
"""The rails whose sum is all that a board or its module takes; of several that a line has, the first counts.

Thor's board, Orin Nano and NX, AGX Orin, Thor's module where the board has no meter.
"""
# What a sensor that is not there or is asleep gives.
_COLDEST = -55.0

_RAIL = re.compile(r"(?<!\S)([A-Z][A-Z0-9_]*) (\d+)(?:mW(?:/\d+mW){0,2}|/\d+)(?!\S)")
_TEMPERATURE = re.compile(r"(?<!\S)(\w+)@(-?\d+(?:\.\d+)?)C(?:/-?\d+(?:\.\d+)?C)*(?!\S)")
_CPU = re.compile(r"(?<!\S)CPU \[([^\]]*)\](?:@(\d+))?(?!\S)")
_CORE = re.compile(r"\d+%@(\d+)")
_CLOCK = re.compile(r"(?<!\S)(GR3D|EMC)_FREQ (?:\d+%)?@(?:\[([\d, ]+)\]|(\d+))(?!\S)")
_CLOCK_NAMES = {"GR3D": "gpu", "EMC": "memory"}


class TegrastatsLine(NamedTuple):
    """What a line says, as far as it is used here."""

    rails: Mapping[str, int]
    """Milliwatts of now, by the rail's name."""
    temperatures: Mapping[str, float]
    """Degrees Celsius, by the place's name."""
    clocks: Mapping[str, float]
    """MHz of `cpu`, `gpu` and `memory`: the mean of cores that are on, and of a GPU's clusters."""

    @property
    def total_rails(self) -> tuple[str, ...]:
        """The rails that sum up to the whole, of `TOTALS`; empty where the line has not all of any."""
        return next((names for names in TOTALS if self.rails.keys() >= set(names)), ())


def parse_line(line: str) -> TegrastatsLine:
    """What `line` says; what it does not say, or says in no known form, is left out."""
    rails = {name: int(milliwatts) for name, milliwatts in _RAIL.findall(line)}
    temperatures = {name: float(degrees) for name, degrees in _TEMPERATURE.findall(line)}
    return TegrastatsLine(
        rails, {name: degrees for name, degrees in temperatures.items() if degrees > _COLDEST}, _clocks(line)
    )


def _clocks(line: str) -> dict[str, float]:
    clocks = {}
    cores = _CPU.search(line)
    if cores:
        megahertz = [float(value) for value in ([cores[2]] if cores[2] else _CORE.findall(cores[1]))]
        if megahertz:
            clocks["cpu"] = fmean(megahertz)
    for unit, several, single in _CLOCK.findall(line):
        values = [float(value) for value in (several or single).split(",") if value.strip()]
        if values:
            clocks[_CLOCK_NAMES[unit]] = fmean(values)
    return clocks
