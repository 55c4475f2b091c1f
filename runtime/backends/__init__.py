"""Engine libraries behind one small interface. Adding one is a module here and its names below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sinkprune.contract.errors import BackendError, UsageError
from sinkprune.runtime.backends.compatibility import TARGETS, BuiltEngines

Tensor = Any
"""A tensor in the engine library's own buffer, on its device."""

BACKENDS = tuple(TARGETS)

_PROVIDERS = {"ort-cpu": "CPUExecutionProvider", "ort-cuda": "CUDAExecutionProvider"}


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

    def join(self, parts: Sequence[Tensor], order: np.ndarray[Any, Any]) -> Tensor:
        """[1,S,d]: rows of `parts` [...,d], counted through all parts one behind the other, in `order` [S] int64."""
        ...

    def mark(self) -> Any:
        """The moment at which all work enqueued before is done."""
        ...

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two marks; waits for the second."""
        ...


def load_backend(name: str, threads: int | None = None, built: BuiltEngines | None = None) -> Backend:
    """The backend `name`, found to fit the engines `built`, which ORT can do without and TensorRT cannot.

    `threads` is for CPU work (default: all cores). Raises `BackendError`, `EnginesError`, `UsageError`.
    """
    if name not in BACKENDS:
        raise BackendError(f"unknown backend '{name}'; known backends: {', '.join(BACKENDS)}.")
    if built is not None:
        built.check_backend(name)
    if name in _PROVIDERS:
        from sinkprune.runtime.backends.ort import OrtBackend

        if built is not None:
            built.check_processor(_PROVIDERS[name])
        backend = OrtBackend(name, _PROVIDERS[name], threads)
        if built is not None:
            built.check_library("onnxruntime", backend.versions["onnxruntime"])
        return backend
    from sinkprune.runtime.backends.tensorrt import open_tensorrt

    if threads is not None:
        raise UsageError(f"threads is {threads}, but backend '{name}' computes on the GPU. Leave it out.")
    if built is None:
        raise UsageError(
            f"backend '{name}' runs engines, and none were given. Build them with: sinkprune-build BUNDLE -o ENGINES "
            f"--target {TARGETS[name]}, and add --engines ENGINES."
        )
    return open_tensorrt(name, built)
