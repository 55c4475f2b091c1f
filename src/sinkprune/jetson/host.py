"""The machine that the doctor examines: its board, JetPack, power mode and Python."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from sinkprune.contract.checks import escaped
from sinkprune.contract.child_processes import python_command
from sinkprune.contract.memory import available_bytes
from sinkprune.jetson.boards import Boards
from sinkprune.runtime.power.sensors import GPU_FOLDERS
from sinkprune.runtime.processor import instructions, processor_name
from sinkprune.runtime.system import usable_cores

_MOST_BYTES = 32 << 20
"""A limit above the largest file, dpkg's list of packages."""
_PIECE = 1 << 16
"""Some files of the kernel reject larger reads."""


class SystemFiles:
    """Reads small text files of the system. A file that cannot be read is recorded, without an error."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root
        self.unreadable: list[str] = []
        """Existing paths that cannot be read, without `root`, with the reason."""

    def text(self, path: str) -> str | None:
        """Return the text of `path`, relative to the root; None if it is missing or cannot be read."""
        try:
            with (self.root / path).open("rb") as file:
                pieces = iter(partial(file.read, _PIECE), b"")
                return b"".join(islice(pieces, _MOST_BYTES // _PIECE)).decode("utf-8", "replace")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self.unreadable.append(f"/{path}: {error.strerror}")
            return None

    def line(self, path: str) -> str | None:
        """Return the first line of `path` without blanks and a device tree's final zero byte; None without one."""
        text = self.text(path)
        lines = text.replace("\0", "\n").split("\n") if text else []
        return (lines[0].strip() or None) if lines else None

    def number(self, path: str) -> int | None:
        """Return the whole number in `path`; None without one."""
        line = self.line(path)
        return int(line) if line and line.isdecimal() else None

    def matching(self, pattern: str) -> list[str]:
        try:
            return sorted(str(path.relative_to(self.root)) for path in self.root.glob(pattern))
        except OSError as error:
            self.unreadable.append(f"/{pattern}: {error.strerror}")
            return []

    def target(self, path: str) -> str | None:
        try:
            return (self.root / path).readlink().name
        except OSError:
            return None


_RELEASE = re.compile(r"#\s*R(\d+)\s*\(release\),\s*REVISION:\s*(\d+(?:\.\d+)*)")
_CUDA = ("usr/local/cuda/version.json", "usr/local/cuda-13/version.json", "usr/local/cuda-12/version.json")
_TENSORRT = re.compile(r"libnvinfer\d+")
_MODULES = "usr/lib/python3*/dist-packages/tensorrt/__init__.py"
_UPSTREAM = re.compile(r"\d+(?:\.\d+)*")
"""The upstream version of a package's: "10.3.0.30" of "10.3.0.30-1+cuda12.5"."""


@dataclass(frozen=True)
class InstalledJetPack:
    """The versions of the vendor's software; None if missing."""

    l4t: str | None
    """Of Jetson Linux, as in "36.4.3"."""
    package: str | None
    """Of the package nvidia-jetpack."""
    cuda: str | None
    tensorrt: str | None
    tensorrt_python: tuple[str, ...]
    """The system's Pythons with TensorRT's module, as in "3.10"."""


def read_installed(files: SystemFiles) -> InstalledJetPack:
    """Return the installed versions."""
    packages, release = _packages(files), _RELEASE.search(files.text("etc/nv_tegra_release") or "")
    tensorrt = next((version for name, version in packages.items() if _TENSORRT.fullmatch(name)), None)
    modules = [re.search(r"python(3\.\d+)/", path) for path in files.matching(_MODULES)]
    if None in modules:
        # /usr/lib/python3 has the modules of Debian's own Python, of any version.
        modules.append(re.fullmatch(r"python(3\.\d+)", files.target("usr/bin/python3") or ""))
    upstream = _UPSTREAM.match(tensorrt or packages.get("tensorrt", ""))
    return InstalledJetPack(
        l4t=f"{release[1]}.{release[2]}" if release else None,
        package=packages.get("nvidia-jetpack"),
        cuda=_cuda(files),
        tensorrt=upstream[0] if upstream else None,
        tensorrt_python=tuple(sorted({module[1] for module in modules if module})),
    )


def _cuda(files: SystemFiles) -> str | None:
    """Return the toolkit's version, from its own file."""
    for path in _CUDA:
        try:
            return str(json.loads(files.text(path) or "")["cuda"]["version"])
        except (ValueError, KeyError, TypeError):
            continue
    return None


def _packages(files: SystemFiles) -> dict[str, str]:
    versions = {}
    for paragraph in (files.text("var/lib/dpkg/status") or "").split("\n\n"):
        fields = dict(re.findall(r"^(Package|Status|Version): (.+)$", paragraph, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed") and {"Package", "Version"} <= fields.keys():
            versions[fields["Package"]] = fields["Version"]
    return versions


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
    configuration, status = files.text("etc/nvpmodel.conf") or "", files.text(_STATUS) or ""
    modes = {name: int(number) for number, name in _MODE.findall(configuration)}
    found = re.search(r"pmode:(\d+)", status)
    if found is None and not any(path.startswith(f"/{_STATUS}") for path in files.unreadable):
        found = _DEFAULT.search(configuration)
    if found is None:
        return None
    number = int(found[1])
    return PowerMode(number, next((name for name, own in modes.items() if own == number), None), modes)


def read_cpu_clock(files: SystemFiles) -> ClockFrequency | None:
    """Return the first core's clock; None if unknown."""
    clock = _read_clock(files, f"{_CPU}/scaling_", 1000)
    return clock if clock.most or clock.governor else None


def read_gpu_clock(files: SystemFiles) -> ClockFrequency | None:
    """Return a Jetson's GPU clock; None if unknown."""
    for folder in (path for pattern in GPU_FOLDERS for path in files.matching(pattern)):
        clock = _read_clock(files, f"{folder}/", 1_000_000)
        if clock.most:
            return clock
    return None


def _read_clock(files: SystemFiles, prefix: str, per_mhz: int) -> ClockFrequency:
    values = [files.number(f"{prefix}{what}_freq") for what in ("cur", "min", "max")]
    now, least, most = (None if value is None else round(value / per_mhz) for value in values)
    return ClockFrequency(now, least, most, files.line(f"{prefix}governor"))


# Each library is imported in its own process, because a library for another machine may end the process.
_IMPORT = """
import sys
try:
    {}
    print(library.__version__)
except Exception as error:
    found = error.__cause__ or error
    sys.exit(f"{{type(found).__name__}}: {{found}}")
"""
_BY = {
    "onnxruntime": "onnxruntime.library import import_onnxruntime as load; library = load('ort-cpu')",
    "openvino": "openvino.backend import import_openvino as load; library = load('openvino')",
    "tensorrt": "tensorrt import import_tensorrt as load; library = load('tensorrt')",
    "tensorrt_rtx": "tensorrt import import_tensorrt as load; library = load('tensorrt-rtx')",
}
_PROGRAMS = {
    **{name: _IMPORT.format(f"from sinkprune.runtime.backends.{words}") for name, words in _BY.items()},
    "cuda.bindings": _IMPORT.format("import cuda.bindings as library, cuda.bindings.driver"),
    "pycuda": _IMPORT.format("import pycuda as library, pycuda.driver; library.__version__ = library.VERSION_TEXT"),
}
_SECONDS = 120
_LONGEST = 300


@dataclass(frozen=True)
class Library:
    """An installed engine library, or a library for CUDA."""

    version: str | None
    """None if it does not import."""
    error: str | None
    """The error of the import, in one line."""


@dataclass(frozen=True)
class PythonEnvironment:
    """A Python, with the facts that matter to engine libraries."""

    version: str
    executable: str
    architecture: str
    virtual: bool
    """Whether it belongs to a virtual environment."""
    sees_system: bool
    """Whether it imports packages of the system's Python, such as JetPack's TensorRT."""
    libraries: dict[str, Library]
    """The installed libraries, by their import name."""

    @property
    def minor(self) -> str:
        """The major and minor version, as in "3.10"."""
        return ".".join(self.version.split(".")[:2])

    def imports(self, name: str) -> bool:
        """Return whether this library is installed and imports."""
        return name in self.libraries and self.libraries[name].error is None

    def version_of(self, name: str) -> str | None:
        """Return the version of this library; None if it is not installed or does not import."""
        return self.libraries[name].version if name in self.libraries else None


def this_environment() -> PythonEnvironment:
    """Return the Python of this process. Imports each installed library as a test."""
    virtual = sys.prefix != sys.base_prefix
    return PythonEnvironment(
        version=platform.python_version(),
        executable=sys.executable,
        architecture=platform.machine(),
        virtual=virtual,
        sees_system=not virtual or _includes_system(Path(sys.prefix, "pyvenv.cfg")),
        libraries={name: _library(program) for name, program in _PROGRAMS.items() if _installed(name)},
    )


def _installed(name: str) -> bool:
    # A missing parent package raises `ModuleNotFoundError`.
    with suppress(ModuleNotFoundError):
        return find_spec(name) is not None
    return False


def _includes_system(configuration: Path) -> bool:
    try:
        lines = configuration.read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    return any(line.replace(" ", "").lower() == "include-system-site-packages=true" for line in lines)


def _library(program: str) -> Library:
    try:
        done = subprocess.run(
            python_command(program), capture_output=True, text=True, errors="replace", timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        return Library(None, f"importing it took more than {_SECONDS} s")
    except OSError as error:
        return Library(None, f"no process could be started to import it: {error.strerror}")
    if done.returncode == 0:
        return Library(done.stdout.strip().splitlines()[-1], None)
    if done.returncode < 0:
        return Library(None, f"its import ended the process (signal {-done.returncode})")
    return Library(None, escaped(" ".join(done.stderr.split())[-_LONGEST:]))


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
    system = re.search(r'^PRETTY_NAME="?([^"\n]*)', files.text("etc/os-release") or "", re.MULTILINE)
    memory = re.search(r"^MemTotal:\s+(\d+) kB", files.text("proc/meminfo") or "", re.MULTILINE)
    try:
        disk_free = shutil.disk_usage(folder).free
    except OSError:
        disk_free = None
    return Machine(
        model=files.line(f"{_DEVICE_TREE}/model"),
        board=boards.name_of(words),
        chip=chips[0] if chips else None,
        system=system[1] if system else None,
        kernel=files.line("proc/sys/kernel/osrelease"),
        jetpack=read_installed(files),
        python=python,
        power_mode=read_power_mode(files),
        cpu_clock=read_cpu_clock(files),
        gpu_clock=read_gpu_clock(files),
        processor=processor_name(cpuinfo),
        instructions=instructions(cpuinfo),
        cores=usable_cores(files.root),
        memory_bytes=int(memory[1]) * 1024 if memory else None,
        free_bytes=available_bytes(files.root) or None,
        swap=_swap(files),
        disk=str(folder.absolute()),
        disk_free_bytes=disk_free,
        unreadable=tuple(files.unreadable),
    )


def _swap(files: SystemFiles) -> tuple[Swap, ...]:
    """Read /proc/swaps, whose lines have a place, its kind, its KiB, the used KiB, and a priority."""
    lines = [line.split() for line in (files.text("proc/swaps") or "").splitlines()[1:]]
    return tuple(
        Swap(words[0], int(words[2]) * 1024, "zram" in words[0])
        for words in lines
        if len(words) >= 3 and words[2].isdecimal()
    )
