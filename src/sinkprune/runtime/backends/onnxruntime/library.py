"""ONNX Runtime as a Python library: imported here only, without its telemetry."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from sinkprune.contract.checks import install_command
from sinkprune.contract.errors import BackendError

DTYPES: dict[str, Any] = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(int32)": "int32",
    "tensor(int64)": "int64",
    "tensor(bool)": "bool",
    "tensor(uint8)": "uint8",
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
            f"Install it with: {install_command('cpu')}, or extra cuda for an NVIDIA GPU."
        ) from error
    onnxruntime.disable_telemetry_events()
    return onnxruntime


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


Provider = str | tuple[str, dict[str, str]]
"""An execution provider, with its options if it has any."""


def provider_name(provider: Provider) -> str:
    """Return the name of an execution provider."""
    return provider if isinstance(provider, str) else provider[0]


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


def failed(graph: str, shapes: Mapping[str, Any], error: Exception) -> BackendError:
    """Return what to raise for an `error` of onnxruntime, which ran `graph` on inputs of these `shapes`, by name.

    Its errors have no common base class.
    """
    given = ", ".join(f"{name} {shape}" for name, shape in shapes.items()) or "a replay"
    return BackendError(
        f"graph '{graph}' failed in onnxruntime on {given}: {words(error)}. If memory ran out, end other "
        "programs; if not, export the bundle again."
    )
