"""The Python of this process, and the engine libraries that it can import."""

from __future__ import annotations

import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from sinkprune.contract.checks.terminal import escaped
from sinkprune.contract.system.child_processes import python_command

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
    "openvino": "openvino.library import import_openvino as load; library = load('openvino')",
    "tensorrt": "tensorrt.library import import_tensorrt as load; library = load('tensorrt')",
    "tensorrt_rtx": "tensorrt.library import import_tensorrt as load; library = load('tensorrt-rtx')",
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
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        # Raised for a missing parent package.
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
