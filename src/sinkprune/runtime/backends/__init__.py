"""The interface of backends, each an engine library on a device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sinkprune.contract.checks import WholeNumber, format_value, unknown_name
from sinkprune.contract.errors import BackendError, UsageError
from sinkprune.contract.manifest import CacheForm
from sinkprune.contract.precision import Array
from sinkprune.contract.registry import load_object
from sinkprune.runtime.backends.known import COMPUTES, KNOWN, Compute
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.device.stopwatch import Clock

if TYPE_CHECKING:
    from sinkprune.contract.engines_manifest import Range
    from sinkprune.contract.report import CaptureReport
    from sinkprune.runtime.backends.compatibility import BuiltEngines
    from sinkprune.runtime.backends.small_graphs import GraphWriter

Tensor = Any
"""A tensor in the engine library's own buffer, on its device."""

_MOST_THREADS = 4 * (os.cpu_count() or 1)
THREADS = WholeNumber(
    "threads", 1, _MOST_THREADS, f"a whole number from 1 to {_MOST_THREADS}, four for each processor"
)
"""CPU threads to compute with: up to four times this machine's cores."""


class Engine(Protocol):
    """One loaded graph of a bundle."""

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return all outputs by name, from all inputs by name; both are tensors of the backend, on its device.

        Raises `BackendError` where the library fails.
        """


class Cache(Protocol):
    """The keys and values of one decoder segment's layers, of one answer.

    The last reference to it frees its memory.
    """

    length: int
    """How many rows it holds."""


class Decoder(Protocol):
    """A loaded decoder segment, which keeps the keys and values of earlier rows in a cache."""

    def new_cache(self, expected: int = 0) -> Any:
        """Return an empty `Cache` for this decoder. Its memory grows with its rows.

        Where calls are captured, it has room for the `expected` rows at once, so that shapes stay the same.
        """

    def __call__(self, inputs: Mapping[str, Tensor], cache: Any) -> dict[str, Tensor]:
        """Return `hidden_out` of new rows, and `query` and `key` where a select follows, from `hidden`, `cos`, `sin`.

        There may be more outputs. A new row attends to the rows of `cache` and to the new rows up to itself. The call
        adds the new rows to `cache`. Answers may alternate, each with its own caches. Raises `BackendError` where the
        library fails or memory runs out; then the cache cannot be used any more.
        """

    def keys_and_values(self, cache: Any) -> dict[str, Tensor]:
        """Return the keys and values of `cache` [1,Hkv,C,h] by their names in the graph, as in `past_key_3`.

        C is at least the cache's length, and rows after it are finite. They are valid until the cache is used again.
        """

    def save(self, cache: Any, rows: int) -> Any:
        """Return a copy of the keys and values of the first `rows` rows of `cache`, for `restore`."""

    def restore(self, saved: Any, rows: int, length: int, expected: int = 0) -> Any:
        """Return a new `Cache` with the first `rows` rows of what `save` returned, which stays as it is.

        `length` is how many rows it will hold next, and `expected` at last, as for `new_cache`.
        """


class TokenDecoder(Protocol):
    """All decoder segments and the head as one engine, for one new row."""

    def __call__(self, inputs: Sequence[Mapping[str, Tensor]], caches: Sequence[Any]) -> Tensor:
        """Return the logits [1,vocab] after a new row, from what each segment's `Decoder` takes.

        Only the first of `inputs` has `hidden`. The call adds the row to `caches`, one of each segment. Raises what a
        `Decoder` raises.
        """


class Backend(Clock, Protocol):
    """An engine library on a device: loads graphs, holds tensors, and measures times."""

    name: str
    """A name in `KNOWN`."""
    threads: int
    """CPU threads an engine computes with."""
    compute: str
    """What engines compute in, in words for reports."""
    cache: str
    """The type of keys and values, in words for reports."""
    versions: dict[str, str]
    """The versions of libraries, and the device, for reports."""
    turn: AbstractContextManager[Any]
    """Held by a thread while it calls engines; a null context where the library runs several calls at once."""
    resumes: bool = True
    """Whether a decoder takes several new rows after earlier ones, as sessions need."""
    enqueues: bool = False
    """Whether calls of engines return before they are done, so that the host waits where it reads a tensor. The
    tensors have a `shape`, which can be read at once."""
    prepares_frames: int = 0
    """The most frames that a call of a graph prepares; 0 where the host prepares them, as on processors, where Pillow
    is quicker (docs/pictures.md)."""
    joins_segments: bool = False
    """Whether new tokens run through one engine of all decoder segments and the head."""
    compiles_lengths: bool = False
    """Whether an engine compiles operators when it first meets a number of rows, which then takes longer."""

    @property
    def machine(self) -> str:
        """What computes, in words for reports: the GPU, where the library names one, and the processor."""
        from sinkprune.runtime.processor import processor_name

        gpu = self.versions.get("gpu")
        return f"{gpu}, {processor_name()}" if gpu else processor_name()

    def captured(self) -> CaptureReport | None:
        """Return what is captured as CUDA graphs, for reports; None where no backend of the kind captures."""
        return None

    def load(self, model: Model) -> Engine:
        """Load the engine of one graph, from the bundle's ONNX file or a built engine.

        Raises `BackendError`, also where inputs or outputs differ from the bundle's list; and what a held file raises
        that was altered since it was opened.
        """

    def load_decoder(self, model: Model, form: CacheForm, wrap: Callable[[Engine], Engine]) -> Decoder:
        """Load the decoder segment of one graph, with caches of the bundle's `form`.

        The decoder calls `wrap(engine)` instead of its engine. Where caches are buffers, this engine receives all
        inputs of the graph contract. Raises what `load` raises.
        """

    def load_token_decoder(
        self, models: Iterable[Model], form: CacheForm, wrap: Callable[[Engine], Engine]
    ) -> TokenDecoder:
        """Load the decoder segments and the head, `models`, as one engine for new tokens, where `joins_segments`.

        Called before `load_decoder`, with the same `form`; raises what `load` raises.
        """
        raise RuntimeError("load_token_decoder needs joins_segments")

    def load_small(self, name: str, graph: GraphWriter) -> Engine:
        """Load a graph of that name that the runtime writes itself, where `prepares_frames`; called in a `turn`."""
        raise RuntimeError("load_small needs prepares_frames")

    def frame_ranges(self, name: str) -> Mapping[str, Range]:
        """Return the range of each input of the engine for the graph of frames `name`; none if it takes any shape."""
        return {}

    def tensor(self, array: Array) -> Tensor:
        """Return `array` as a tensor on the device, which may share the array's memory."""

    def borrow(self, frame: Any) -> Tensor:
        """Return a frame on the GPU, of another library, as a tensor [1,height,width,3] that shares its memory.

        Only where `prepares_frames`. Raises `ImageError` for what is no uint8, pixel after pixel.
        """
        raise RuntimeError("borrow needs prepares_frames")

    def stack(self, parts: Sequence[Tensor]) -> Tensor:
        """Return `parts` joined along their first axis. Only where `prepares_frames`."""
        raise RuntimeError("stack needs prepares_frames")

    def numpy(self, tensor: Tensor) -> Array:
        """Return `tensor` as a host array; waits until it is computed."""

    def best(self, logits: Tensor) -> tuple[int, bool]:
        """Return the index of the largest of `logits` [1,vocab], ties to the lower one, and whether all are finite.

        Waits until they are computed.
        """
        array = self.numpy(logits)[0]
        return int(np.argmax(array)), bool(np.isfinite(array).all())

    def not_finite(self, tensor: Tensor) -> Tensor:
        """Return [1] fp32: how many values of `tensor` are not finite."""
        return self.tensor(np.array([np.count_nonzero(~np.isfinite(self.numpy(tensor)))], np.float32))

    def small(self, name: str, *kind: Any) -> Engine:
        """Return the engine of a graph of `small_graphs`, for tensors of this kind, as its writer takes it.

        Only where `enqueues`: elsewhere the host has read what it needs.
        """
        raise RuntimeError("small needs enqueues")

    def join(self, parts: Sequence[Tensor], order: Array, shape: tuple[int, ...] | None = None) -> Tensor:
        """Return [1,S,d], or that in `shape`: rows of `parts` [...,d], numbered through all, in `order` [S] int64."""

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return the parts [1,...] of `tensor` [G,...]."""
        array = self.numpy(tensor)
        return [self.tensor(array[group : group + 1]) for group in range(len(array))]


def load_backend(
    name: str, threads: int | None = None, built: BuiltEngines | None = None, compute: Compute | None = None
) -> Backend:
    """Open the backend `name`, and check that it fits the engines `built`; only TensorRT requires engines.

    `threads` is for CPU work (default: all cores). `compute`, one of `COMPUTES`, is for all backends but ort-cuda and
    TensorRT (default: fastest). Raises `BackendError`, `EnginesError`, `UsageError`.
    """
    if not isinstance(name, str) or name not in KNOWN:
        raise BackendError(unknown_name(f"unknown backend {format_value(name)}", name, KNOWN, "Known backends"))
    threads = None if threads is None else THREADS.check(threads)
    if threads is not None and not KNOWN[name].takes_threads:
        raise UsageError(f"threads is {threads}, but backend '{name}' computes on the GPU. Leave it out.")
    if compute is not None:
        _check_compute(name, compute, built)
    if built is not None:
        built.check_backend(name)
    backend: Backend = load_object(KNOWN[name].opened_by)(name, threads, compute or "fastest", built)
    return backend


def _check_compute(name: str, compute: Any, built: BuiltEngines | None) -> None:
    if not isinstance(compute, str) or compute not in COMPUTES:
        raise UsageError(unknown_name(f"unknown compute {format_value(compute)}", compute, COMPUTES, "Known"))
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
