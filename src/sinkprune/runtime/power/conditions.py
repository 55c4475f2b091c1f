"""Temperatures and clocks of a machine, once a second while a program does its work."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

from sinkprune.contract.report import ConditionsReport
from sinkprune.runtime.power.sensors import ROOT

PERIOD_SECONDS = 1.0
_ZONES = "sys/class/thermal/thermal_zone*"
_CPU_CLOCKS = ("sys/devices/system/cpu/cpufreq/policy*/scaling_cur_freq",)
GPU_FOLDERS = ("sys/class/devfreq/*gpu*", "sys/class/devfreq/*.ga10b", "sys/class/devfreq/*.gb10b")
"""Patterns of the folder of a Jetson's GPU: 17000000.gpu or .ga10b on Orin, gpu-gpc-0 and higher on Thor."""
_GPU_CLOCKS = tuple(f"{folder}/cur_freq" for folder in GPU_FOLDERS)


class ConditionsLog:
    """The conditions that `logging_conditions` has read so far."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, dict[str, float], dict[str, float]]] = []

    def add(self, root: Path) -> None:
        """Add the present conditions, from the system's files below `root`."""
        self._rows.append((time.monotonic(), *read_conditions(root)))

    def report(self, start: float) -> ConditionsReport:
        """Return all conditions, with seconds counted from `start`, a moment of `time.monotonic`."""
        return ConditionsReport(
            seconds=tuple(seconds - start for seconds, _, _ in self._rows),
            temperatures_c=_by_name([temperatures for _, temperatures, _ in self._rows]),
            clocks_mhz=_by_name([clocks for _, _, clocks in self._rows]),
        )


@contextmanager
def logging_conditions(root: Path = ROOT) -> Iterator[ConditionsLog]:
    """Yield a log of the conditions at the block's beginning and end, and once a second in between."""
    log, ended = ConditionsLog(), threading.Event()

    def add_periodically() -> None:
        while not ended.wait(PERIOD_SECONDS):
            log.add(root)

    log.add(root)
    thread = threading.Thread(target=add_periodically, name="conditions", daemon=True)
    thread.start()
    try:
        yield log
    finally:
        ended.set()
        thread.join()
        log.add(root)


def read_conditions(root: Path = ROOT) -> tuple[dict[str, float], dict[str, float]]:
    """Return the temperatures in Celsius by place, and the mean clocks in MHz of `cpu` and, on a Jetson, `gpu`.

    They are read from the system's files below `root`. What cannot be read is left out.
    """
    temperatures, namesakes = {}, Counter[str]()
    for zone in sorted(root.glob(_ZONES)):
        millidegrees, name = _read_number(zone / "temp"), _read(zone / "type") or zone.name
        if millidegrees is not None:
            namesakes[name] += 1
            temperatures[name if namesakes[name] == 1 else f"{name} {namesakes[name]}"] = millidegrees / 1e3
    clocks = {"cpu": _mean(root, _CPU_CLOCKS, 1e3), "gpu": _mean(root, _GPU_CLOCKS, 1e6)}
    return temperatures, {unit: megahertz for unit, megahertz in clocks.items() if megahertz is not None}


def _by_name(rows: list[Mapping[str, float]]) -> dict[str, tuple[float | None, ...]]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: tuple(row.get(name) for row in rows) for name in names}


def _mean(root: Path, patterns: tuple[str, ...], per_mhz: float) -> float | None:
    found = [_read_number(path) for pattern in patterns for path in root.glob(pattern)]
    values = [value / per_mhz for value in found if value is not None]
    return fmean(values) if values else None


def _read_number(path: Path) -> float | None:
    try:
        return float(_read(path) or "")
    except ValueError:
        return None


def _read(path: Path) -> str | None:
    """Return the text of a file; None if it is missing, or if its device is asleep."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
