"""Engine libraries behind one small interface. Adding one is a module, and a row in `known`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, Protocol

from sinkprune.contract.checks.format_value import format_value
from sinkprune.contract.checks.ranges import WholeNumber
from sinkprune.contract.errors import BackendError, UsageError
from sinkprune.contract.manifest import CacheForm
from sinkprune.contract.precision import Array
from sinkprune.runtime.backends.compatibility import BuiltEngines
from sinkprune.runtime.backends.known import BACKENDS, COMPUTES, KNOWN, Compute
from sinkprune.runtime.backends.models import Model

Tensor = Any
"""A tensor in the engine library's own buffer, on its device."""

THREADS = WholeNumber("threads", 1, 4 * (os.cpu_count() or 1))
"""CPU threads to compute with: up to four times this machine's cores."""


class Engine(Protocol):
    """One loaded graph of a bundle, to be called as often as wanted."""

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All outputs by name, from all inputs by name; both are in the backend's own buffers, on its device.

        Raises `BackendError` where the library gives up.
        """


class Cache(Protocol):
    """The keys and values of one decoder segment's layers, of one answer.

    Its memory goes back with the last reference to it.
    """

    length: int
    """How many rows it holds."""


class Decoder(Protocol):
    """A loaded decoder segment, which keeps the keys and values of all rows it has seen in a cache."""

    def new_cache(self) -> Any:
        """A `Cache` that is empty, for calls of this decoder only. It takes its memory as it grows."""

    def __call__(self, inputs: Mapping[str, Tensor], cache: Any) -> dict[str, Tensor]:
        """`hidden_out`, and where a select follows `query` and `key`, from `hidden`, `cos` and `sin` of new rows.

        There may be more outputs. New rows see those of `cache` and, of themselves, those up to their own; then they
        are among those of `cache`. Answers may take turns, each with caches of its own. Raises `BackendError` where
        the library gives up or memory runs out; the cache is of no use then.
        """


class Backend(Protocol):
    """An engine library on a device: loads graphs, holds tensors, and tells the time of what they do."""

    name: str
    """One of `BACKENDS`."""
    threads: int
    """CPU threads an engine computes with."""
    compute: str
    """What engines compute in, in words for reports."""
    cache: str
    """The type of keys and values, in words for reports."""
    versions: dict[str, str]
    """What reports tell of the library and its device, by name."""
    turn: AbstractContextManager[Any]
    """Held by a thread while it calls engines; a null context where the library runs several calls at once."""

    def load(self, model: Model) -> Engine:
        """The engine of one graph, from the bundle's ONNX file or a built one.

        Raises `BackendError`, also where it takes or gives something else than the bundle says; and what a held file
        raises that was altered since it was opened.
        """

    def load_decoder(self, model: Model, form: CacheForm, wrap: Callable[[Engine], Engine]) -> Decoder:
        """The decoder segment of one graph, whose caches are of the form that the bundle names.

        It calls `wrap` of its engine in that one's place. Where caches are buffers, that is given all inputs of the
        graph contract. Raises what `load` raises.
        """

    def tensor(self, array: Array) -> Tensor:
        """`array` as a tensor on the device, which may share the array's memory."""

    def numpy(self, tensor: Tensor) -> Array:
        """`tensor` as a host array; waits until it is computed."""

    def join(self, parts: Sequence[Tensor], order: Array) -> Tensor:
        """[1,S,d]: rows of `parts` [...,d], counted through all parts one behind the other, in `order` [S] int64."""

    def mark(self) -> Any:
        """The moment at which all work enqueued before is done; `elapsed_ms` of two tells the time between them."""

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two marks of `mark`; waits for the second."""


def load_backend(
    name: str, threads: int | None = None, built: BuiltEngines | None = None, compute: Compute | None = None
) -> Backend:
    """The backend `name`, found to fit the engines `built`, without which TensorRT alone cannot do.

    `threads` is for CPU work (default: all cores); `compute`, one of `COMPUTES`, is for all but ort-cuda and TensorRT
    (default: fastest). Raises `BackendError`, `EnginesError`, `UsageError`.
    """
    if not isinstance(name, str) or name not in BACKENDS:
        raise BackendError(f"unknown backend {format_value(name)}; known backends: {', '.join(BACKENDS)}.")
    threads = None if threads is None else THREADS.check(threads)
    if threads is not None and not KNOWN[name].takes_threads:
        raise UsageError(f"threads is {threads}, but backend '{name}' computes on the GPU. Leave it out.")
    if compute is not None:
        _check_compute(name, compute, built)
    if built is not None:
        built.check_backend(name)
    backend: Backend = import_module(f"{__name__}.{KNOWN[name].module}").open_backend(
        name, threads, compute or "fastest", built
    )
    return backend


def _check_compute(name: str, compute: Any, built: BuiltEngines | None) -> None:
    """Refuse what the backend of that name, or the engines `built`, cannot compute in; raises `UsageError`."""
    if not isinstance(compute, str) or compute not in COMPUTES:
        raise UsageError(f"unknown compute {format_value(compute)}; known: {', '.join(COMPUTES)}.")
    choices = KNOWN[name].computes
    if not choices:
        raise UsageError(
            f"compute is '{compute}', but backend '{name}' computes in the types of the bundle's graphs. "
            "Leave it out."
        )
    if compute not in choices:
        raise UsageError(f"compute is '{compute}', backend '{name}' has {' and '.join(choices)}. Choose one.")
    if built is not None and "onnxruntime" in KNOWN[name].libraries and compute != "fastest":
        raise UsageError(
            f"compute is '{compute}', but engines for onnxruntime are built to be fastest. Give the bundle, which "
            "computes in either."
        )
