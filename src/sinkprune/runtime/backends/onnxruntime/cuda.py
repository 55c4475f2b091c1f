"""ONNX Runtime on a CUDA GPU, on one stream, with captured CUDA graphs.

Tensors are in memory of our own, and engines are bound to their addresses. ONNX Runtime's own memory holds what lives
within one call: a captured graph uses it again at every replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from functools import cache
from importlib.metadata import entry_points
from io import StringIO
from itertools import count
from threading import get_ident
from typing import Any

import numpy as np

from sinkprune.contract.errors import BackendError
from sinkprune.contract.manifest import CacheForm
from sinkprune.runtime.backends import Decoder, Engine
from sinkprune.runtime.backends.compatibility import BuiltEngines
from sinkprune.runtime.backends.device_memory import DeviceMemory, DeviceTensor, Shapes
from sinkprune.runtime.backends.known import Compute
from sinkprune.runtime.backends.kv_cache import BufferedDecoder, cache_names
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.backends.onnxruntime.backend import OrtBackend, opened
from sinkprune.runtime.backends.onnxruntime.library import DTYPES, Provider, failed, session_options, words
from sinkprune.runtime.backends.onnxruntime.sizes_on_device import with_sizes_on_device
from sinkprune.runtime.backends.small_graphs import WRITERS, GraphWriter
from sinkprune.runtime.device.captures import Capture, Captures
from sinkprune.runtime.device.cuda import Device, open_device
from sinkprune.runtime.device.turns import Turns

CUDA = ("CUDAExecutionProvider", {"use_tf32": "0"})
"""fp32 products round nothing to TF32: selection must choose the same tokens as on a CPU."""
_TURNS = Turns()
"""While a thread of this process captures, CUDA refuses most calls of the others, and the capture fails."""
_NOT_CAPTURED = -1
"""ONNX Runtime's number of a call that launches kernel by kernel."""
_MOST_NUMBERS = 512
"""Graphs that one session captures in its life. The library may hold a released graph until the session ends."""
KERNELS = "sinkprune.cuda_kernels"
"""The entry points of engines with kernels. Each takes this backend and a `Model`, and returns an engine or None."""
OpenSession = Callable[[Provider, Mapping[str, int]], Any]
"""Returns a session on a provider, with constants in the place of dimensions of these names."""
_REMEMBERED = 4096
"""Sets of input shapes of an engine whose output shapes are remembered."""


class OrtCudaBackend(DeviceMemory, OrtBackend):
    """ONNX Runtime on the first CUDA GPU. Threads take turns, and calls of engines return before they are done."""

    device, provider = "cuda", CUDA
    prepares_frames = 16

    def __init__(
        self,
        name: str,
        threads: int | None,
        compute: Compute,
        library: Any = None,
        new_device: Callable[[], Device] = open_device,
    ) -> None:
        """Take `library`, the module onnxruntime, and a new device, in tests those of stand-ins."""
        OrtBackend.__init__(self, name, threads, compute, library)
        load_cuda_libraries(self._ort)
        device = new_device()
        DeviceMemory.__init__(self, device, Captures(device))
        self.versions["gpu"] = device.name
        self.turn = _TURNS
        self._small = cache(lambda name, *kind: self.load_small(name, WRITERS[name](*kind)))
        self.plain: Provider = (CUDA[0], {**CUDA[1], "user_compute_stream": str(device.stream)})
        self.capturing: Provider = (CUDA[0], {**self.plain[1], "enable_cuda_graph": "1"})

    def load(self, model: Model) -> Engine:
        return (None if model.weights else self._with_kernels(model)) or self._load_engine(model, {})

    def _with_kernels(self, model: Model) -> Engine | None:
        """Return an engine that runs kernels in the place of function bodies; None where there are none for it."""
        try:
            with self.turn:
                engines = (entry.load()(self, model) for entry in entry_points(group=KERNELS))
                return next((engine for engine in engines if engine is not None), None)
        except BackendError as error:
            self.captures.note_missing(model.graph, str(error))
            return None

    def load_decoder(self, model: Model, form: CacheForm, wrap: Callable[[Engine], Engine]) -> Decoder:
        in_place = cache_names(model.spec) if form == "in-place" else {}
        engine = wrap(self._load_engine(model, in_place))
        with self.turn:
            return BufferedDecoder(engine, self, model.spec, form)

    def _load_engine(self, model: Model, in_place: Mapping[str, str]) -> CudaEngine:
        def open_session(provider: Provider, sizes: Mapping[str, int]) -> Any:
            return self._open(model, provider, sizes)[0]

        with self.turn:
            return CudaEngine(self, model.graph, open_session, in_place, own_sessions=not model.weights)

    def load_small(self, name: str, graph: GraphWriter) -> Engine:
        return self.small_engine(name, graph.model(), own_sessions=False)

    def small(self, name: str, *kind: Any) -> Engine:
        return self._small(name, *kind)

    def _fitted(self, model: Model) -> bytes | None:
        return with_sizes_on_device(model.onnx)

    def small_engine(self, graph: str, onnx: bytes, *, own_sessions: bool) -> CudaEngine:
        """Return the engine of an ONNX file without weights; raises `BackendError`."""

        def open_session(provider: Provider, sizes: Mapping[str, int]) -> Any:
            options = session_options(self._ort)
            for name, size in sizes.items():
                options.add_free_dimension_override_by_name(name, size)
            try:
                return self._ort.InferenceSession(onnx, options, providers=[provider], enable_fallback=0)
            except Exception as error:
                raise BackendError(f"'{graph}' does not load in onnxruntime: {words(error)}.") from error

        return CudaEngine(self, graph, open_session, {}, own_sessions=own_sessions)

    def run_options(self, number: int) -> Any:
        """Return the options of a call that is captured as the graph of this `number`, without a wait at its end."""
        options = self._ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(number))
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        return options


class CudaEngine:
    """A graph in ONNX Runtime, called with device tensors by the names of its inputs.

    ONNX Runtime captures a graph only if it copies no size from the processor to the GPU. Graphs without weights
    compute with sizes, so each of their captures has a session of its own, in which sizes are constants.
    Source: ONNX Runtime's documentation of the CUDA provider, `enable_cuda_graph`.
    """

    def __init__(
        self,
        backend: OrtCudaBackend,
        graph: str,
        open_session: OpenSession,
        in_place: Mapping[str, str],
        *,
        own_sessions: bool,
    ) -> None:
        """Load the graph of this name. `in_place` maps outputs to the inputs in whose memory they are written.

        With `own_sessions`, each capture has a session of its own.
        """
        self._backend, self._graph, self._open_session, self._in_place = backend, graph, open_session, in_place
        self._own_sessions, self._numbers = own_sessions, count(1)
        self._eager = backend.run_options(_NOT_CAPTURED)
        self._session = self._open()
        self._inputs = {value.name: value.shape for value in self._session.get_inputs()}
        self._outputs = {value.name: np.dtype(DTYPES[value.type]) for value in self._session.get_outputs()}
        self._known: dict[Shapes, Shapes] = {}

    @property
    def given(self) -> list[tuple[str, str, list[int | str | None]]]:
        """The outputs: name, type and shape, with a name or None for a size that varies."""
        return [(value.name, DTYPES[value.type], value.shape) for value in self._session.get_outputs()]

    def _open(self) -> Any:
        backend = self._backend
        if not self._own_sessions and backend.gpu.has_graphs:
            try:
                return self._open_session(backend.capturing, {})
            except BackendError as error:
                session = self._open_session(backend.plain, {})
                backend.captures.refuse(self._graph, str(error))
                return session
        return self._open_session(backend.plain, {})

    def __call__(self, inputs: Mapping[str, DeviceTensor]) -> dict[str, DeviceTensor]:
        """Return all outputs by name, which may not be computed yet; raises `BackendError`."""
        shapes = tuple(inputs[name].shape for name in self._inputs)
        captures, graph = self._backend.captures, self._graph
        known = self._known.get(shapes)
        if known is None:
            results = self._run_unknown(inputs)
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[shapes] = tuple(result.shape for result in results.values())
            captures.note(graph, self._key(shapes, inputs, results))
            return results
        results = {
            name: inputs[self._in_place[name]] if name in self._in_place else self._backend.empty(shape, dtype)
            for (name, dtype), shape in zip(self._outputs.items(), known, strict=True)
        }

        def enqueue() -> None:
            binding = self._bound(self._session, inputs, results)
            self._run(self._session, binding, self._eager, inputs)

        captures.run(
            graph, self._key(shapes, inputs, results), enqueue, lambda: self._capture(shapes, inputs, results)
        )
        return results

    def _key(
        self, shapes: Shapes, inputs: Mapping[str, DeviceTensor], results: Mapping[str, DeviceTensor]
    ) -> tuple[Any, ...]:
        # ONNX Runtime captures for each thread.
        own = (inputs[name] for name in self._inputs)
        return get_ident(), shapes, *(tensor.address for tensor in (*own, *results.values()))

    def _capture(
        self, shapes: Shapes, inputs: Mapping[str, DeviceTensor], results: Mapping[str, DeviceTensor]
    ) -> Capture:
        """Run a call, and capture it."""
        session, number = self._session, next(self._numbers)
        if self._own_sessions:
            session = self._open_session(self._backend.capturing, self._sizes(shapes))
        elif number > _MOST_NUMBERS:
            raise BackendError(f"{_MOST_NUMBERS} sets of shapes and addresses were captured, the most of a session.")
        binding, options = self._bound(session, inputs, results), self._backend.run_options(number)
        try:
            # The first call with a number runs, then captures and replays.
            self._run(session, binding, options, inputs)
        except BackendError:
            # After an error the stream is still in capture.
            with suppress(BackendError):
                self._backend.gpu.end_capture()
            raise
        return Capture(
            # Without the tensors, whose memory is lent again between calls.
            lambda: self._run(session, binding, options, {}),
            # Older versions free a graph with its session only.
            release=lambda: getattr(session, "release_captured_graph", lambda _: None)(number),
        )

    def _sizes(self, shapes: Shapes) -> dict[str, int]:
        return {
            name: size
            for named, shape in zip(self._inputs.values(), shapes, strict=True)
            for name, size in zip(named, shape, strict=True)
            if isinstance(name, str)
        }

    def _run_unknown(self, inputs: Mapping[str, DeviceTensor]) -> dict[str, DeviceTensor]:
        """Run a call whose output shapes are not known. Its results are copied from ONNX Runtime's memory to ours."""
        given = {name: inputs[own] for name, own in self._in_place.items()}
        binding = self._bound(self._session, inputs, given)
        others = [name for name in self._outputs if name not in given]
        for name in others:
            binding.bind_output(name, self._backend.device)
        self._run(self._session, binding, self._eager, inputs)
        for name, value in zip(others, binding.get_outputs()[len(given) :], strict=True):
            given[name] = self._backend.empty(tuple(value.shape()), self._outputs[name])
            if given[name].nbytes:
                self._backend.gpu.copy(given[name].address, value.data_ptr(), given[name].nbytes)
        return {name: given[name] for name in self._outputs}

    def _bound(self, session: Any, inputs: Mapping[str, DeviceTensor], results: Mapping[str, DeviceTensor]) -> Any:
        """Return a binding of all inputs, and of the outputs in `results`, to their addresses."""
        binding, device = session.io_binding(), self._backend.device
        for name in self._inputs:
            own = inputs[name]
            binding.bind_input(name, device, 0, own.dtype, own.shape, own.address)
        for name, own in results.items():
            binding.bind_output(name, device, 0, own.dtype, own.shape, own.address)
        return binding

    def _run(self, session: Any, binding: Any, options: Any, inputs: Mapping[str, DeviceTensor]) -> None:
        try:
            session.run_with_iobinding(binding, options)
        except Exception as error:
            shapes = {name: list(value.shape) for name, value in inputs.items()}
            raise failed(self._graph, shapes, error) from error


def open_backend(name: str, threads: int | None, compute: Compute, built: BuiltEngines | None) -> OrtBackend:
    """Open the backend `name` for the engines `built`, if any; raises `BackendError` and `EnginesError`."""
    return opened(OrtCudaBackend, name, threads, compute, built)


def load_cuda_libraries(onnxruntime: Any) -> None:
    """Load CUDA and cuDNN from NVIDIA's Python packages, where these are installed.

    Otherwise the system finds them, or the provider does not start. The library prints what it does not find.
    """
    if hasattr(onnxruntime, "preload_dlls"):
        with redirect_stdout(StringIO()):
            onnxruntime.preload_dlls(directory="")
