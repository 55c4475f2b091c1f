"""One line of `tegrastats`, as JetPack 5 to 7 print it on Orin and Thor. The format has no version.

    RAM 3452/7620MB (lfb 25x4MB) SWAP 1518/16384MB (cached 174MB) CPU [1%@1420,off] EMC_FREQ 43%@2133
    GR3D_FREQ 63%@[621] NVDEC off cpu@50.031C/50.5C VDD_IN 4824mW/4824mW/4824mW VDD_SOC 1475mW/1475mW/1475mW

A rail's first value is its present power. The mean since the start follows, and from JetPack 7.2 on the maximum.
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
"""The rails whose sum is the power of a whole board or module. If a line has several, the first counts.

In order: Thor's board; Orin Nano and NX; AGX Orin; Thor's module on a board without a meter.
"""
# A sensor that is absent or asleep reads -256 degrees.
_COLDEST = -55.0

_RAIL = re.compile(r"(?<!\S)([A-Z][A-Z0-9_]*) (\d+)(?:mW(?:/\d+mW){0,2}|/\d+)(?!\S)")
_TEMPERATURE = re.compile(r"(?<!\S)(\w+)@(-?\d+(?:\.\d+)?)C(?:/-?\d+(?:\.\d+)?C)*(?!\S)")
_CPU = re.compile(r"(?<!\S)CPU \[([^\]]*)\](?:@(\d+))?(?!\S)")
_CORE = re.compile(r"\d+%@(\d+)")
_CLOCK = re.compile(r"(?<!\S)(GR3D|EMC)_FREQ (?:\d+%)?@(\[[\d, ]+\]|\d+)(?!\S)")
_CLOCK_NAMES = {"GR3D": "gpu", "EMC": "memory"}


class TegrastatsLine(NamedTuple):
    """The parts of a line that sinkprune uses."""

    rails: Mapping[str, int]
    """Present milliwatts, by the rail's name."""
    temperatures: Mapping[str, float]
    """Degrees Celsius, by the place's name."""
    clocks: Mapping[str, float]
    """MHz of `cpu`, `gpu` and `memory`: the mean of cores that are on, and of a GPU's clusters."""

    @property
    def total_rails(self) -> tuple[str, ...]:
        """The first of `TOTALS` that the line has completely; empty if there is none."""
        return next((names for names in TOTALS if self.rails.keys() >= set(names)), ())


def parse_line(line: str) -> TegrastatsLine:
    """Return the known parts of a line; parts that are missing or have no known form are left out."""
    temperatures = {name: float(degrees) for name, degrees in _TEMPERATURE.findall(line)}
    clocks = {_CLOCK_NAMES[unit]: re.findall(r"\d+", values) for unit, values in _CLOCK.findall(line)}
    if cpu := _CPU.search(line):
        cores, all_cores = cpu.groups()
        clocks["cpu"] = [all_cores] if all_cores else _CORE.findall(cores)
    return TegrastatsLine(
        rails={name: int(milliwatts) for name, milliwatts in _RAIL.findall(line)},
        temperatures={name: degrees for name, degrees in temperatures.items() if degrees > _COLDEST},
        clocks={unit: fmean(map(float, megahertz)) for unit, megahertz in clocks.items() if megahertz},
    )
