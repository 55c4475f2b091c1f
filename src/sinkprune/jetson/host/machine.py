"""The facts of a machine, from the system's files and its Python."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from sinkprune.contract.system.system_memory import available_bytes
from sinkprune.jetson.boards import Boards
from sinkprune.jetson.host.jetpack_files import InstalledJetPack, read_installed
from sinkprune.jetson.host.power_mode import (
    ClockFrequency,
    PowerMode,
    read_cpu_clock,
    read_gpu_clock,
    read_power_mode,
)
from sinkprune.jetson.host.python_environment import PythonEnvironment
from sinkprune.jetson.host.system_files import SystemFiles
from sinkprune.runtime.system.cores import usable_cores
from sinkprune.runtime.system.processor import instructions, processor_name

_DEVICE_TREE = "proc/device-tree"


@dataclass(frozen=True)
class Swap:
    """A swap file or device."""

    place: str
    bytes: int
    compressed: bool
    """Whether it is compressed memory (zram), which gains little for weights."""


@dataclass(frozen=True)
class Machine:
    """A machine. Unknown facts are None or empty."""

    model: str | None
    """The name in its device tree."""
    board: str | None
    """The name of its board in `boards.json`."""
    chip: str | None
    """The kind of its chip, also if the board is unknown."""
    system: str | None
    kernel: str | None
    jetpack: InstalledJetPack
    python: PythonEnvironment
    power_mode: PowerMode | None
    cpu_clock: ClockFrequency | None
    gpu_clock: ClockFrequency | None
    processor: str
    instructions: str
    cores: int
    memory_bytes: int | None
    free_bytes: int | None
    """Memory that is free for programs now."""
    swap: tuple[Swap, ...]
    disk: str
    """The folder on the disk of `disk_free_bytes`."""
    disk_free_bytes: int | None
    unreadable: tuple[str, ...]
    """Existing files that cannot be read, with the reason."""


def read_machine(files: SystemFiles, python: PythonEnvironment, boards: Boards, folder: Path) -> Machine:
    """Return the machine of these system files; `folder` is the place of bundles."""
    words = (files.text(f"{_DEVICE_TREE}/compatible") or "").split("\0")
    chips = [kind for word, kind in boards.chips.items() if word in words]
    cpuinfo = files.root / "proc/cpuinfo"
    return Machine(
        model=files.line(f"{_DEVICE_TREE}/model"),
        board=boards.name_of(words),
        chip=chips[0] if chips else None,
        system=_system(files),
        kernel=files.line("proc/sys/kernel/osrelease"),
        jetpack=read_installed(files),
        python=python,
        power_mode=read_power_mode(files),
        cpu_clock=read_cpu_clock(files),
        gpu_clock=read_gpu_clock(files),
        processor=processor_name(cpuinfo),
        instructions=instructions(cpuinfo),
        cores=usable_cores(files.root),
        memory_bytes=_memory(files),
        free_bytes=available_bytes(files.root) or None,
        swap=_swap(files),
        disk=str(folder.absolute()),
        disk_free_bytes=_disk(folder),
        unreadable=tuple(files.unreadable),
    )


def _system(files: SystemFiles) -> str | None:
    found = re.search(r'^PRETTY_NAME="?([^"\n]*)', files.text("etc/os-release") or "", re.MULTILINE)
    return found[1] if found else None


def _memory(files: SystemFiles) -> int | None:
    found = re.search(r"^MemTotal:\s+(\d+) kB", files.text("proc/meminfo") or "", re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _swap(files: SystemFiles) -> tuple[Swap, ...]:
    """Read /proc/swaps, whose lines have a place, its kind, its KiB, the used KiB, and a priority."""
    lines = [line.split() for line in (files.text("proc/swaps") or "").splitlines()[1:]]
    return tuple(
        Swap(words[0], int(words[2]) * 1024, "zram" in words[0])
        for words in lines
        if len(words) >= 3 and words[2].isdecimal()
    )


def _disk(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
