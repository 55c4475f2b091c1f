"""The backend of TensorRT.

Only `numpy` and `elapsed_ms` wait for the device: output shapes follow from input shapes, and stream order keeps
memory safe. Never run on a GPU yet; tested with fakes of the library and the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from math import prod
from typing import Any

import numpy as np

from sinkprune.contract.checks import install_command
from sinkprune.contract.errors import BackendError, EnginesError, UsageError
from sinkprune.contract.manifest import CacheForm
from sinkprune.contract.memory import compared_sizes, gigabytes
from sinkprune.contract.precision import Array
from sinkprune.runtime.backends import Backend, Decoder, Engine
from sinkprune.runtime.backends.compatibility import BuiltEngines
from sinkprune.runtime.backends.known import KNOWN, Compute
from sinkprune.runtime.backends.kv_cache import BufferedDecoder, CacheMemory, cache_names, fixed_room, row_runs
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.backends.tensorrt.engine import (
    ActivationMemory,
    CudaGraphs,
    DeviceTensor,
    Session,
    TensorRTEngine,
)
from sinkprune.runtime.device.cuda import Device, MemoryPool, open_device
from sinkprune.runtime.system import Turns

_INSTALL = {
    "tensorrt": "On a Jetson it comes with JetPack (make the virtual environment with --system-site-packages); "
    f"elsewhere: {install_command('tensorrt')}",
    "tensorrt-rtx": f"Install it with: {install_command('tensorrt-rtx')}",
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


PLUGINS = "sinkprune.tensorrt_plugins"
"""The entry points that register plugins. Each takes the library, and returns the sha256 of kernels by plugin."""


def open_backend(name: str, threads: int | None, compute: Compute, built: BuiltEngines | None) -> TensorRTBackend:
    """Open the backend `name` on the first GPU; raises `BackendError`, `EnginesError` and `UsageError`."""
    if built is None:
        raise UsageError(
            f"backend '{name}' runs engines, and none were given. Build them with: sinkprune-build BUNDLE -o ENGINES "
            f"--target {KNOWN[name].target}, and add --engines ENGINES."
        )
    return TensorRTBackend(name, import_tensorrt(name), open_device(), built)


class TensorRTBackend(Backend, CacheMemory):
    """TensorRT or TensorRT-RTX on a device, with engines that fit both.

    Tensors are `DeviceTensor`. All work is enqueued on the device's only stream.
    """

    threads = 1
    """The CPU thread that enqueues."""

    def __init__(self, name: str, library: Any, device: Device, built: BuiltEngines) -> None:
        """Compare `engines.json` with `library`, the module, and with `device`, before any engine is loaded.

        Raises `EnginesError` if they do not fit or memory is too small, and `BackendError` if the library does not
        take our plugins.
        """
        built.check_library(name, library.__version__)
        built.check_gpu(device.name, device.compute_capability)
        if built.engines.manifest.plugins:
            found: dict[str, str] = {}
            for entry in entry_points(group=PLUGINS):
                found |= entry.load()(library)
            built.check_plugins(found)
        self._check_memory(built, device)
        self.name = name
        self.compute, self.cache = "the graphs' types", "the graphs' type"
        self.versions = {name: library.__version__, "gpu": device.name, "cuda_graphs": str(device.has_graphs).lower()}
        self._device, self._built = device, built
        self._pool = MemoryPool(device)
        log = new_error_log(library)
        self._session = Session(library, device, self._pool, ActivationMemory(device), CudaGraphs(device), log.errors)
        self._runtime = library.Runtime(log)
        self.turn = Turns()
        # Engines of the other dialect have the profile `prefill` without a cache, and `decode` with one new row.
        self.resumes = built.bundle.manifest.cache == "in-place"

    def load(self, model: Model) -> Engine:
        return self._load(model, {})

    def load_decoder(self, model: Model, form: CacheForm, wrap: Callable[[Engine], Engine]) -> Decoder:
        in_place = cache_names(model.spec) if form == "in-place" else {}
        engine = wrap(self._load(model, in_place))
        profiles = self._built.engines.manifest.engines[model.graph].optimisation_profiles
        return BufferedDecoder(engine, self, model.spec, form, fixed_room(model.spec, profiles))

    def _load(self, model: Model, in_place: Mapping[str, str]) -> TensorRTEngine:
        """Load the engine of one graph. `in_place` maps outputs to the inputs in whose memory they are written."""
        free, _ = self._device.memory()
        self._session.errors.clear()
        # Mapped, not read: gigabytes must not be in host and device memory at once, which boards share.
        with model.file.mapped() as serialized:
            engine = self._runtime.deserialize_cuda_engine(serialized)
        if engine is None:
            raise BackendError(
                f"{self.name} cannot load '{model.file.path}' of {model.file.size / 1e6:.1f} MB with "
                f"{free / 1e6:.1f} MB of GPU memory free{self._session.reason()}. If the file is damaged: "
                f"{self._built.rebuild}"
            )
        spec = self._built.engines.manifest.engines[model.graph]
        return TensorRTEngine(model.graph, engine, spec, self._session, in_place)

    def tensor(self, array: Array) -> DeviceTensor:
        array = np.ascontiguousarray(array)
        tensor = DeviceTensor(self._pool.allocate(array.nbytes), array.shape, array.dtype)
        self._device.copy_in(tensor.address, array)
        return tensor

    def numpy(self, tensor: DeviceTensor) -> Array:
        """Return `tensor` as a host array; waits until all work enqueued so far is done."""
        array = np.empty(tensor.shape, tensor.dtype)
        self._device.copy_out(array, tensor.address)
        return array

    def join(self, parts: Sequence[DeviceTensor], order: Array) -> DeviceTensor:
        """Return [1,S,d]: rows of `parts` in `order`, copied on the device, run by run."""
        width, dtype = parts[0].shape[-1], parts[0].dtype
        shape, row = (1, len(order), width), width * dtype.itemsize
        joined = DeviceTensor(self._pool.allocate(len(order) * row), shape, dtype)
        for part, first, count, place in row_runs([prod(part.shape[:-1]) for part in parts], order):
            self._device.copy(joined.address + place * row, parts[part].address + first * row, count * row)
        return joined

    def rows(self, tensor: DeviceTensor) -> int:
        return tensor.shape[1]

    def buffers(self, count: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[DeviceTensor]:
        size = prod(shape) * dtype.itemsize
        return [DeviceTensor(self._pool.allocate(size), shape, dtype) for _ in range(count)]

    def copy_rows(self, pairs: Iterable[tuple[DeviceTensor, DeviceTensor]], place: int, rows: int) -> None:
        for source, target in pairs:
            _, heads, given, size = source.shape
            row, room = size * source.dtype.itemsize, target.shape[2]
            self._device.copy_lines(
                target.address + place * row, room * row, source.address, given * row, rows * row, heads
            )

    def zero_rows(self, targets: Iterable[DeviceTensor], first: int) -> None:
        for target in targets:
            _, heads, room, size = target.shape
            row = size * target.dtype.itemsize
            if first < room:
                self._device.zero_lines(target.address + first * row, room * row, (room - first) * row, heads)

    def mark(self) -> Any:
        # While another thread captures a graph, the event would be captured too.
        with self.turn:
            return self._device.record_event()

    def elapsed_ms(self, start: Any, end: Any) -> float:
        return self._device.elapsed_ms(start, end)

    @staticmethod
    def _check_memory(built: BuiltEngines, device: Device) -> None:
        manifest = built.engines.manifest
        weights = sum(manifest.files[spec.file].size for spec in manifest.engines.values())
        activations = max(spec.device_memory or 0 for spec in manifest.engines.values())
        free, total = device.memory()
        if weights + activations > free:
            needed, left = compared_sizes(weights + activations, free)
            raise EnginesError(
                f"the engines in '{built.engines.path}' need {needed} ({gigabytes(weights)} of weights and code, "
                f"{gigabytes(activations)} of activations), {device.name} "
                f"has {left} of {gigabytes(total)} free. End other programs, build with a smaller "
                "--max-prompt, or export the checkpoint in a smaller precision."
            )
