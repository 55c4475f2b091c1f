"""Engine libraries behind one small interface. Adding one is a module here and its names below."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sinkprune.errors import BackendError

Tensor = Any
"""A tensor in the engine library's own buffer, on its device."""

BACKENDS = ("ort-cpu", "ort-cuda")


class Engine(Protocol):
    """One loaded graph."""

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All outputs by name; they stay on the device."""
        ...


class Backend(Protocol):
    """An engine library on a device."""

    name: str
    threads: int
    versions: dict[str, str]

    def load(self, path: Path) -> Engine:
        """Load one graph; raises `BackendError`."""
        ...

    def tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        """A host array on the device."""
        ...

    def numpy(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        """A tensor on the host."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""
        ...


def load_backend(name: str, threads: int | None = None) -> Backend:
    """The backend `name`; `threads` is for CPU work (default: all cores). Raises `BackendError`."""
    from sinkprune.runtime.backends.ort import OrtBackend

    providers = {"ort-cpu": "CPUExecutionProvider", "ort-cuda": "CUDAExecutionProvider"}
    if name not in providers:
        raise BackendError(f"unknown backend '{name}'; known backends: {', '.join(BACKENDS)}.")
    return OrtBackend(name, providers[name], threads)
