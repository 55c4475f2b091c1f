"""Power sensors. Adding one is a module here and its row in `_SENSORS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from sinkprune.contract.errors import NoSensorError

AUTO = "auto"
"""Asks for the first sensor that is there and sees what computes."""
ROOT = Path("/")
SILENT_SECONDS = 3.0
"""A sensor that tells nothing new for so long is taken to be dead."""


class Reading(NamedTuple):
    """What a sensor tells at one moment."""

    seconds: float
    """By `time.monotonic`, which no change of the wall clock moves."""
    joules: float
    """Since the sensor was started."""
    temperatures: Mapping[str, float] = {}
    """In degrees Celsius, by the place's name."""
    clocks: Mapping[str, float] = {}
    """In MHz, by the unit's name."""


class Sensor(Protocol):
    """What tells of the power of this machine, or of a part of it."""

    name: str
    """One of `SENSORS`."""
    measures: str
    """What its joules are of, in words for reports."""

    def start(self) -> None:
        """Begin to measure; joules are counted from here. Raises `PowerError`."""

    def read(self) -> Reading:
        """The next reading; waits for it, `SILENT_SECONDS` at most. Raises `PowerError` where none comes."""

    def stop(self) -> None:
        """End what `start` began."""


def open_sensor(name: str, *, on_gpu: bool, root: Path = ROOT) -> Sensor:
    """The sensor `name`, found to be readable, or with `AUTO` the first that is there.

    `on_gpu` says that engines compute on a GPU of its own: `AUTO` then passes over sensors that do not see it. Below
    `root` lie the system's files. Raises `NoSensorError` where none is there, and `PowerError` where it may not be
    read: no other is taken in its place.
    """
    if name != AUTO:
        return _SENSORS[name].open(root)
    reasons = []
    for kind, row in _SENSORS.items():
        if on_gpu and not row.sees_gpus:
            reasons.append(f"{kind}: does not see the GPU")
            continue
        try:
            return row.open(root)
        except NoSensorError as error:
            reasons.append(f"{kind}: {str(error).rstrip('.')}")
    raise NoSensorError(
        f"no power sensor was found: {'; '.join(reasons)}. Leave --power out, or measure on a machine that has one."
    )


class _Row(NamedTuple):
    open: Callable[[Path], Sensor]
    sees_gpus: bool


def _open_tegrastats(root: Path) -> Sensor:
    from sinkprune.runtime.power.tegrastats import Tegrastats

    return Tegrastats()


def _open_rapl(root: Path) -> Sensor:
    from sinkprune.runtime.power.rapl import Rapl

    return Rapl(root)


def _open_nvml(root: Path) -> Sensor:
    from sinkprune.runtime.power.nvml import Nvml

    return Nvml()


_SENSORS = {
    "tegrastats": _Row(_open_tegrastats, sees_gpus=True),
    "rapl": _Row(_open_rapl, sees_gpus=False),
    "nvml": _Row(_open_nvml, sees_gpus=True),
}
SENSORS = (AUTO, *_SENSORS)
"""What may be asked for, in the order in which `AUTO` looks."""
