"""ONNX Runtime as a Python library: imported here only, without its telemetry."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

from sinkprune.contract.errors import BackendError

DTYPES: dict[str, Any] = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(int64)": "int64",
    "tensor(bool)": "bool",
}
"""The types of tensors, by ONNX Runtime's names."""
# The library reads this variable once, when it is loaded.
_TELEMETRY_OFF = "ORT_DISABLE_TELEMETRY"


def import_onnxruntime(name: str) -> Any:
    """Import the library, for the backend or target `name`; raises `BackendError`.

    From 1.29 on, its import writes an identifier and a database to the home directory, and reports to the vendor what
    is run. A robot must not do this, so telemetry is always switched off. If other code imported the library earlier,
    the files stay, and nothing more is reported.
    """
    os.environ[_TELEMETRY_OFF] = "1"
    try:
        import onnxruntime
    except ImportError as error:
        raise BackendError(
            f"'{name}' needs onnxruntime, and its import failed: {error}. "
            "Install it with: pip install 'sinkprune[cpu]', or 'sinkprune[cuda]' for an NVIDIA GPU."
        ) from error
    onnxruntime.disable_telemetry_events()
    return onnxruntime


def load_cuda_libraries(onnxruntime: Any) -> None:
    """Load CUDA and cuDNN from NVIDIA's Python packages, where these are installed.

    Otherwise the system finds them, or the provider does not start. The library prints what it does not find.
    """
    if hasattr(onnxruntime, "preload_dlls"):
        with redirect_stdout(StringIO()):
            onnxruntime.preload_dlls(directory="")


def gpu_name() -> str:
    """Return the name of the first CUDA device, as the driver has it; raises `BackendError` where there is none.

    Source: CUDA Driver API. ONNX Runtime's Python does not tell it.
    """
    name, device = ctypes.create_string_buffer(256), ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BackendError(f"'ort-cuda' needs an NVIDIA driver, and libcuda does not load ({error}).") from error
    calls = (
        (driver.cuInit, 0),
        (driver.cuDeviceGet, ctypes.byref(device), 0),
        (driver.cuDeviceGetName, name, len(name), device),
    )
    for call, *arguments in calls:
        if (status := call(*arguments)) != 0:
            raise BackendError(
                f"'ort-cuda' needs a GPU, and {call.__name__} of the NVIDIA driver failed with {status}. "
                "nvidia-smi -L lists the GPUs."
            )
    return name.value.decode()


@cache
def share_arena(onnxruntime: Any) -> None:
    """Create the arena that sessions with `session.use_env_allocators` share, once in a process.

    An arena keeps the most memory that it ever needed. Graphs run one after the other, so arenas of their own would
    keep the sum of that.
    """
    information = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    # No limit, and the library's defaults for growing.
    onnxruntime.create_and_register_allocator(information, onnxruntime.OrtArenaCfg(0, -1, -1, -1))


def session_options(onnxruntime: Any) -> Any:
    """Return the options of every session: no log on the terminal, and ONNX files only.

    Errors are exceptions anyway. A file in onnxruntime's own format would bypass the checks of ONNX files.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.load_model_format", "ONNX")
    return options


def session_path(path: Path) -> str:
    """Return `path` as sessions take it; raises `BackendError` for a path that is not UTF-8."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise BackendError(
            f"found the path '{path}', which is not UTF-8. onnxruntime opens UTF-8 paths only. Rename the folder, or "
            "use --backend openvino."
        ) from error
    return str(path)


def words(error: Exception) -> str:
    """Return onnxruntime's message in one line, without its final full stop."""
    return " ".join(str(error).split()).removesuffix(".")


@contextmanager
def failing_in(graph: str, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Raise onnxruntime's errors in this block, where it runs `graph` on `inputs`, as a `BackendError`."""
    try:
        yield
    except Exception as error:
        # onnxruntime has no common base class for its errors.
        shapes = ", ".join(f"{name} {value.shape()}" for name, value in inputs.items())
        raise BackendError(
            f"graph '{graph}' failed in onnxruntime on {shapes}: {words(error)}. If memory ran out, end other "
            "programs; if not, export the bundle again."
        ) from error
