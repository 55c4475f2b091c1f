"""Power sensors, and temperatures and clocks while a program does its work.

The sensors are NVIDIA's library, Intel's RAPL and tegrastats. A new one is a function and a row in `_SENSORS`.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from sinkprune.contract.checks import install_command
from sinkprune.contract.child_processes import find_program
from sinkprune.contract.errors import NoSensorError, PowerError
from sinkprune.contract.report import ConditionsReport

ROOT = Path("/")
SILENT_SECONDS = 3.0
"""A sensor without a new reading for this long counts as dead."""
PERIOD_SECONDS = 0.02
"""The time between two looks at a sensor that has to be polled."""


class Reading(NamedTuple):
    """A sensor's values at one moment."""

    seconds: float
    """By `time.monotonic`, which no change of the wall clock moves."""
    joules: float
    """Since the first reading, or the moment before it."""


class Sensor(NamedTuple):
    """A power sensor of this machine, or of a part of it."""

    name: str
    """One of `SENSORS`."""
    measures: str
    """The scope of its joules, in words for reports."""
    readings: Callable[[], Generator[Reading]]
    """Starts a generator, which waits for each reading. It raises `PowerError` after `SILENT_SECONDS` without one."""


def integrated(powers: Generator[tuple[float, float]]) -> Generator[Reading]:
    """Yield a reading for each power in watts, given with its moment, by the trapezoidal rule."""
    joules, last_seconds, last_watts = 0.0, 0.0, None
    with closing(powers):
        for seconds, watts in powers:
            if last_watts is not None:
                joules += (seconds - last_seconds) * (watts + last_watts) / 2
            last_seconds, last_watts = seconds, watts
            yield Reading(seconds, joules)


def count_steps(read: Callable[[], list[int]], ranges: list[int], name: str) -> Iterator[tuple[float, int]]:
    """Yield the moment of each step of counters, and the sum of what they have counted since the start.

    `read` returns the counters, which restart at 0 after `ranges`. A counter moves in steps of its own, so a count
    that has not moved does not show when its energy was used. Raises `PowerError` after `SILENT_SECONDS` without a
    step, and what `read` raises.
    """
    total, last, moved = 0, read(), time.monotonic()
    while True:
        time.sleep(PERIOD_SECONDS)
        counts, now = read(), time.monotonic()
        if counts != last:
            total += sum((count - before) % full for count, before, full in zip(counts, last, ranges, strict=True))
            last, moved = counts, now
            yield now, total
        elif now - moved > SILENT_SECONDS:
            raise PowerError(f"{name} has not moved for {SILENT_SECONDS:.0f} seconds.")


_VISIBLE, _ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
_COUNTER, _POWER = "nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetPowerUsage"
_COUNTER_RANGE = 1 << 64


def open_nvml(root: Path) -> Sensor:
    """Return the energy counter of the first GPU of CUDA_VISIBLE_DEVICES.

    A GPU without a counter (before Volta, vGPUs) is measured by its power. Raises `NoSensorError` without the
    library, a driver or a GPU, and `PowerError` for a GPU that cannot be read.
    """
    try:
        import pynvml
    except ImportError as error:
        raise NoSensorError(f"nvidia-ml-py is not installed. Install it with: {install_command('nvml')}.") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoSensorError(f"NVIDIA's driver does not answer: {error}.") from error
    gpu = _Gpu(pynvml, _find_handle(pynvml))
    board = f"{gpu.query('nvmlDeviceGetName')}, the board"
    if gpu.query(_COUNTER, optional=True) is not None:
        return Sensor("nvml", board, gpu.readings_by_counter)
    gpu.query(_POWER)
    return Sensor(
        "nvml", f"{board}, by its power, which newer GPUs average over a second", lambda: integrated(gpu.powers())
    )


class _Gpu:
    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle

    def readings_by_counter(self) -> Generator[Reading]:
        steps = count_steps(lambda: [self.query(_COUNTER)], [_COUNTER_RANGE], "the GPU's counter")
        for seconds, millijoules in steps:
            yield Reading(seconds, millijoules / 1e3)

    def powers(self) -> Generator[tuple[float, float]]:
        while True:
            milliwatts = self.query(_POWER)
            yield time.monotonic(), milliwatts / 1e3
            time.sleep(PERIOD_SECONDS)

    def query(self, function: str, *, optional: bool = False) -> Any:
        """Return what a function of the library returns for this GPU; None if `optional` and not supported.

        Raises `PowerError`.
        """
        try:
            return getattr(self._library, function)(self._handle)
        except self._library.NVMLError_NoPermission as error:
            raise PowerError("the GPU's power may not be read: no permission. Run this command with sudo.") from error
        except self._library.NVMLError as error:
            if optional and isinstance(error, self._library.NVMLError_NotSupported):
                return None
            raise PowerError(f"the GPU's power cannot be read: {error}.") from error


def _find_handle(library: Any) -> Any:
    count = library.nvmlDeviceGetCount()
    if count == 0:
        raise NoSensorError("NVIDIA's driver finds no GPU.")
    first = os.environ.get(_VISIBLE, "").split(",")[0].strip()
    try:
        if first.startswith("GPU-"):
            return library.nvmlDeviceGetHandleByUUID(first)
        if count == 1:
            return library.nvmlDeviceGetHandleByIndex(0)
        if first.isdecimal() and os.environ.get(_ORDER) == "PCI_BUS_ID":
            return library.nvmlDeviceGetHandleByIndex(int(first))
    except library.NVMLError as error:
        raise PowerError(f"{_VISIBLE} names the GPU '{first}', which cannot be read: {error}.") from error
    raise PowerError(
        f"this machine has {count} GPUs, and the one in use is not known. Set {_VISIBLE} to its UUID, which "
        "nvidia-smi -L lists."
    )


# The same domains are listed again as intel-rapl-mmio. psys includes packages, and packages include core and uncore.
_ZONES = "intel-rapl:*"
_COUNTED = re.compile(r"package-\d+|dram")


def open_rapl(root: Path) -> Sensor:
    """Return the counters of all packages, and of memory that no package includes.

    Raises `NoSensorError` without a counter below `root`, and `PowerError` for one that cannot be read.
    """
    folder = root / "sys/class/powercap"
    zones = {zone: (zone / "name").read_text().strip() for zone in sorted(folder.glob(_ZONES)) if zone.is_dir()}
    counted = {zone: name for zone, name in zones.items() if _COUNTED.fullmatch(name)}
    if not counted:
        raise NoSensorError(
            f"there is no RAPL counter of a processor below '{folder}' ({_ZONES}). Virtual machines have none, "
            "and elsewhere the kernel's module is missing: modprobe intel_rapl_msr."
        )
    # A counter restarts at 0 after minutes to hours.
    ranges = [_read_number(zone / "max_energy_range_uj") for zone in counted]

    def read() -> list[int]:
        return [_read_number(zone / "energy_uj") for zone in counted]

    def readings() -> Generator[Reading]:
        for seconds, microjoules in count_steps(read, ranges, "the RAPL counter"):
            yield Reading(seconds, microjoules / 1e6)

    read()
    return Sensor("rapl", f"{' + '.join(counted.values())} of this machine's processors", readings)


def _read_number(path: Path) -> int:
    try:
        return int(path.read_text())
    except PermissionError as error:
        raise PowerError(
            f"'{path}' may not be read: no permission. Run this command with sudo, or until the next start of the "
            "machine allow it to everybody, who can then guess at what others compute (CVE-2020-8694): sudo chmod "
            f"a+r {path.parents[1]}/{_ZONES}/energy_uj"
        ) from error
    except (OSError, ValueError) as error:
        raise PowerError(f"'{path}' holds no number: {error}.") from error


COMMAND = "tegrastats"
TOTALS = (
    ("VIN",),
    ("VDD_IN",),
    ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"),
    ("VDD_GPU", "VDD_CPU_SOC_MSS", "VIN_SYS_5V0"),
)
"""The rails whose sum is the power of a whole board or module. If a line has several, the first counts.

In order: Thor's board; Orin Nano and NX; AGX Orin; Thor's module on a board without a meter.
"""
# A rail's first value is its present power. The mean since the start follows, and from JetPack 7.2 on the maximum.
_RAIL = re.compile(r"(?<!\S)([A-Z][A-Z0-9_]*) (\d+)(?:mW(?:/\d+mW){0,2}|/\d+)(?!\S)")
_PERIOD_MS = 100
_QUOTED = 200
# The longest line of any board has 700 bytes.
_LONGEST_LINE = 1 << 16
# The first lines may come before the meters have been read.
_TRIED_LINES = 5


def open_tegrastats(root: Path) -> Sensor:
    """Return the power of the whole board, a reading every 100 ms.

    Raises `NoSensorError` without the command, and `PowerError` if it does not print the board's power.
    """
    path = find_program(COMMAND)
    if path is None:
        raise NoSensorError(f"there is no '{COMMAND}' in PATH, which boards with JetPack have.")
    rails = _find_rails(path)
    return Sensor(COMMAND, f"{' + '.join(rails)} of this board", lambda: integrated(_powers(path, rails)))


def _find_rails(path: str) -> tuple[str, ...]:
    printed: set[str] = set()
    with closing(_lines(path)) as lines:
        for line in islice(lines, _TRIED_LINES):
            if found := total_rails(line):
                return found
            printed |= line.keys()
    if not printed:
        raise PowerError(
            f"'{path}' prints no power rails. Some boards print them for root only: run this command with sudo."
        )
    known = ", or ".join(" + ".join(names) for names in TOTALS)
    raise PowerError(
        f"'{path}' prints the rails {', '.join(sorted(printed))}, expected {known}: the power of this board as a "
        "whole is not known from them. Leave --power out."
    )


def _powers(path: str, rails: tuple[str, ...]) -> Generator[tuple[float, float]]:
    """Yield the power of each line that has all `rails`, after the moment at which the line arrived.

    The line's own time stamp is ignored: it has whole seconds, and jumps when the board finds a time server.
    """
    complete = time.monotonic()
    with closing(_lines(path)) as lines:
        for line in lines:
            now = time.monotonic()
            # A line may be cut off, be a warning, or lack a rail. The integral bridges it.
            if missing := sorted(set(rails) - line.keys()):
                if now - complete > SILENT_SECONDS:
                    raise PowerError(
                        f"'{path}' has printed no {', no '.join(missing)} for {SILENT_SECONDS:.0f} seconds."
                    )
                continue
            complete = now
            yield now, sum(line[rail] for rail in rails) / 1e3


def _lines(path: str) -> Generator[dict[str, int]]:
    """Yield the rails of each line of a new process, which ends with this generator.

    Raises `PowerError` if it prints no more.
    """
    words = [path, "--interval", str(_PERIOD_MS)]
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0
        )
    except OSError as error:
        raise PowerError(f"'{path}' cannot be started: {error.strerror}.") from error
    with process:
        try:
            yield from _parsed_lines(path, process)
        finally:
            process.kill()


def _parsed_lines(path: str, process: subprocess.Popen[bytes]) -> Iterator[dict[str, int]]:
    assert process.stdout is not None
    pipe, unread, other_words = process.stdout.fileno(), b"", ""
    while True:
        until = time.monotonic() + SILENT_SECONDS
        while b"\n" not in unread:
            if not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
                raise PowerError(f"'{path}' has printed no line for {SILENT_SECONDS:.0f} seconds.")
            if len(unread) > _LONGEST_LINE:
                raise PowerError(f"'{path}' prints a line without end, expected one of some hundred bytes.")
            piece = os.read(pipe, 1 << 16)
            if not piece:
                words = f": {other_words[-_QUOTED:].rstrip('.')}" if other_words else ""
                raise PowerError(f"'{path}' ended with exit code {process.wait()}{words}.")
            unread += piece
        line, _, unread = unread.partition(b"\n")
        text = line.decode(errors="replace")
        rails = parse_rails(text)
        if not rails:
            other_words = text.strip() or other_words
        yield rails


def parse_rails(line: str) -> dict[str, int]:
    """Return the present milliwatts of each rail of a line of `tegrastats`, whose format has no version."""
    return {name: int(milliwatts) for name, milliwatts in _RAIL.findall(line)}


def total_rails(rails: Mapping[str, int]) -> tuple[str, ...]:
    """Return the first of `TOTALS` that a line's `rails` have completely; empty if there is none."""
    return next((names for names in TOTALS if rails.keys() >= set(names)), ())


AUTO = "auto"
"""Chooses the first readable sensor that covers the device in use."""
_SENSORS = {"tegrastats": open_tegrastats, "rapl": open_rapl, "nvml": open_nvml}
_COVER_NO_GPU = {"rapl"}
SENSORS = (AUTO, *_SENSORS)
"""The values of `--power`, in the order in which `AUTO` tries them."""


def open_sensor(name: str, *, on_gpu: bool, root: Path = ROOT) -> Sensor:
    """Return the sensor `name` after a first reading, or with `AUTO` the first sensor that this machine has.

    With `on_gpu`, engines compute on a separate GPU, and `AUTO` skips sensors that do not cover it. `root` is the
    root of the system's files. Raises `NoSensorError` if there is no sensor. Raises `PowerError` for a sensor that
    cannot be read: `AUTO` takes no other in its place.
    """
    if name != AUTO:
        return _SENSORS[name](root)
    reasons = []
    for kind, open_kind in _SENSORS.items():
        if on_gpu and kind in _COVER_NO_GPU:
            reasons.append(f"{kind}: does not cover the GPU")
            continue
        try:
            return open_kind(root)
        except NoSensorError as error:
            reasons.append(f"{kind}: {str(error).rstrip('.')}")
    raise NoSensorError(
        f"no power sensor was found. Tried {'; '.join(reasons)}. Leave --power out, or measure on a machine that has "
        "one."
    )


_SECONDS_BETWEEN_CONDITIONS = 1.0
_THERMAL_ZONES = "sys/class/thermal/thermal_zone*"
_CPU_CLOCKS = ("sys/devices/system/cpu/cpufreq/policy*/scaling_cur_freq",)
GPU_FOLDERS = ("sys/class/devfreq/*gpu*", "sys/class/devfreq/*.ga10b", "sys/class/devfreq/*.gb10b")
"""Patterns of the folder of a Jetson's GPU: 17000000.gpu or .ga10b on Orin, gpu-gpc-0 and higher on Thor."""
_GPU_CLOCKS = tuple(f"{folder}/cur_freq" for folder in GPU_FOLDERS)


class ConditionsLog:
    """The conditions at a block's beginning and end, and once a second in between."""

    def __init__(self, root: Path = ROOT) -> None:
        """Take the root of the system's files."""
        self._root, self._ended = root, threading.Event()
        self._rows: list[tuple[float, dict[str, float], dict[str, float]]] = []
        self._thread = threading.Thread(target=self._add_periodically, name="conditions", daemon=True)

    def __enter__(self) -> None:
        self._add()
        self._thread.start()

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._thread.join()
        self._add()

    def _add_periodically(self) -> None:
        while not self._ended.wait(_SECONDS_BETWEEN_CONDITIONS):
            self._add()

    def _add(self) -> None:
        self._rows.append((time.monotonic(), *read_conditions(self._root)))

    def report(self, start: float) -> ConditionsReport:
        """Return all conditions, with seconds counted from `start`, a moment of `time.monotonic`."""
        return ConditionsReport(
            seconds=tuple(seconds - start for seconds, _, _ in self._rows),
            temperatures_c=_by_name([temperatures for _, temperatures, _ in self._rows]),
            clocks_mhz=_by_name([clocks for _, _, clocks in self._rows]),
        )


def read_conditions(root: Path = ROOT) -> tuple[dict[str, float], dict[str, float]]:
    """Return the temperatures in Celsius by place, and the mean clocks in MHz of `cpu` and, on a Jetson, `gpu`.

    They are read from the system's files below `root`. What cannot be read is left out.
    """
    temperatures, namesakes = {}, Counter[str]()
    for zone in sorted(root.glob(_THERMAL_ZONES)):
        millidegrees, name = _number_in(zone / "temp"), _text_in(zone / "type") or zone.name
        if millidegrees is not None:
            namesakes[name] += 1
            temperatures[name if namesakes[name] == 1 else f"{name} {namesakes[name]}"] = millidegrees / 1e3
    clocks = {"cpu": _mean(root, _CPU_CLOCKS, 1e3), "gpu": _mean(root, _GPU_CLOCKS, 1e6)}
    return temperatures, {unit: megahertz for unit, megahertz in clocks.items() if megahertz is not None}


def _by_name(rows: list[Mapping[str, float]]) -> dict[str, tuple[float | None, ...]]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: tuple(row.get(name) for row in rows) for name in names}


def _mean(root: Path, patterns: tuple[str, ...], per_mhz: float) -> float | None:
    found = [_number_in(path) for pattern in patterns for path in root.glob(pattern)]
    values = [value / per_mhz for value in found if value is not None]
    return fmean(values) if values else None


def _number_in(path: Path) -> float | None:
    try:
        return float(_text_in(path) or "")
    except ValueError:
        return None


def _text_in(path: Path) -> str | None:
    """Return the text of a file; None if it is missing, or if its device is asleep."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
