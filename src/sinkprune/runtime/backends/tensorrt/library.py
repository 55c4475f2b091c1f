"""Imports TensorRT and TensorRT-RTX, and collects their errors."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from sinkprune.contract.errors import BackendError

_INSTALL = {
    "tensorrt": "On a Jetson it comes with JetPack (make the virtual environment with --system-site-packages); "
    "elsewhere: pip install 'sinkprune[tensorrt]'",
    "tensorrt-rtx": "Install it with: pip install 'sinkprune[tensorrt-rtx]'",
}


def import_tensorrt(name: str) -> Any:
    """Import the library `tensorrt` or `tensorrt-rtx`; raises `BackendError`."""
    try:
        return import_module(name.replace("-", "_"))
    except ImportError as error:
        raise BackendError(
            f"'{name}' needs the library {name}, which cannot be imported. {_INSTALL[name]}"
        ) from error


def new_error_log(trt: Any) -> Any:
    """Return a logger of the library `trt` that keeps messages of severity error or worse in `errors`."""

    class ErrorLog(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                self.errors.append(message)

    return ErrorLog()
