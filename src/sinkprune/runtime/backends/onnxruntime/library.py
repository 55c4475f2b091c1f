"""ONNX Runtime as a Python library: imported here only, without its telemetry."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

from sinkprune.contract.errors import BackendError

# Read once, when the library is loaded.
_TELEMETRY_OFF = "ORT_DISABLE_TELEMETRY"


def import_onnxruntime(name: str) -> Any:
    """The library, for the backend or target `name`; raises `BackendError`.

    From 1.29 on, importing it writes an identifier and a database to the home directory and sends to its vendor what
    is run. A robot must not, so this is switched off, whatever the environment says. Where somebody else imported it
    before us, what was written then stays; nothing more is reported.
    """
    os.environ[_TELEMETRY_OFF] = "1"
    try:
        import onnxruntime
    except ImportError as error:
        raise BackendError(
            f"'{name}' needs onnxruntime, which is not installed. "
            "Install it with: pip install 'sinkprune[cpu]', or 'sinkprune[cuda]' for an NVIDIA GPU."
        ) from error
    onnxruntime.disable_telemetry_events()
    return onnxruntime


@cache
def share_arena(onnxruntime: Any) -> None:
    """Have sessions that ask for it (`session.use_env_allocators`) take memory of one arena, made once in a process.

    A session keeps the most that it ever took. Graphs run one after the other, and with an arena each they would keep
    the sum of that.
    """
    information = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    # 0, -1, -1, -1: no limit, and the library's own ways of growing.
    onnxruntime.create_and_register_allocator(information, onnxruntime.OrtArenaCfg(0, -1, -1, -1))


def session_options(onnxruntime: Any) -> Any:
    """Options that every session has: its log is not for the terminal, and it reads ONNX and nothing else.

    What it has to say comes as an exception. A file that onnxruntime took for its own format would be loaded past
    what was checked of it as ONNX.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.load_model_format", "ONNX")
    return options


def session_path(path: Path) -> str:
    """`path` as sessions take it; raises `BackendError` where it is not UTF-8, which onnxruntime cannot open."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise BackendError(
            f"found the path '{path}', which is not UTF-8. onnxruntime opens UTF-8 paths only. Rename the folder, or "
            "use --backend openvino."
        ) from error
    return str(path)


def words(error: Exception) -> str:
    """What onnxruntime said, in one line and without its full stop."""
    return " ".join(str(error).split()).removesuffix(".")
