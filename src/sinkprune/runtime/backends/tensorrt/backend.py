"""The backend of TensorRT.

Output shapes follow from input shapes, and stream order keeps memory safe, so calls never wait for the device. Never
run on a GPU yet; tested with fakes of the library and the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from sinkprune.contract.checks import install_command
from sinkprune.contract.engines_manifest import OptimisationProfiles, Range
from sinkprune.contract.errors import BackendError, EnginesError, UsageError
from sinkprune.contract.manifest import CacheForm, GraphSpec
from sinkprune.contract.memory import compared_sizes, gigabytes
from sinkprune.runtime.backends import Backend, Decoder, Engine
from sinkprune.runtime.backends.compatibility import BuiltEngines
from sinkprune.runtime.backends.device_memory import DeviceMemory
from sinkprune.runtime.backends.known import KNOWN, Compute
from sinkprune.runtime.backends.kv_cache import BufferedDecoder, cache_names
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.backends.small_graphs import GraphWriter, graphs_of
from sinkprune.runtime.backends.tensorrt.engine import ActivationMemory, Session, TensorRTEngine
from sinkprune.runtime.device.captures import Captures
from sinkprune.runtime.device.cuda import Device, open_device
from sinkprune.runtime.device.turns import Turns

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


def fixed_room(spec: GraphSpec, profiles: OptimisationProfiles) -> int | None:
    """Return the only room that an engine of the decoder segment `spec` takes, or None where it takes a range.

    TensorRT updates caches in place only where their size is fixed.
    """
    rooms = {
        shape[2]
        for ranges in profiles.values()
        for name in cache_names(spec).values()
        for shape in (ranges[name].min, ranges[name].max)
    }
    return rooms.pop() if len(rooms) == 1 else None


class TensorRTBackend(DeviceMemory, Backend):
    """TensorRT or TensorRT-RTX on a device, with engines that fit both."""

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
        super().__init__(device, Captures(device))
        self._built = built
        log = new_error_log(library)
        self._session = Session(library, self, ActivationMemory(device), log.errors)
        self._runtime = library.Runtime(log)
        self.turn = Turns()
        # Engines of the other dialect have the profile `prefill` without a cache, and `decode` with one new row.
        self.resumes = built.bundle.manifest.cache == "in-place"
        self.prepares_frames = int("frames" in built.engines.manifest.engines)
        own = graphs_of(built.bundle.manifest)
        for graph in own:
            built.own(graph)
        # At their first use, because sums are compared after this.
        self._small = cache(lambda graph: self.load_small(graph, own[graph]))

    def load(self, model: Model) -> Engine:
        return self._load(model, {})

    def load_decoder(self, model: Model, form: CacheForm, wrap: Callable[[Engine], Engine]) -> Decoder:
        in_place = cache_names(model.spec) if form == "in-place" else {}
        engine = wrap(self._load(model, in_place))
        profiles = self._built.engines.manifest.engines[model.graph].optimisation_profiles
        return BufferedDecoder(engine, self, model.spec, form, fixed_room(model.spec, profiles))

    def _load(self, model: Model, in_place: Mapping[str, str]) -> TensorRTEngine:
        """Load the engine of one graph. `in_place` maps outputs to the inputs in whose memory they are written."""
        free, _ = self.gpu.memory()
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

    def small(self, name: str, *kind: Any) -> Engine:
        return self._small(name)

    def load_small(self, name: str, graph: GraphWriter) -> Engine:
        engines = self._built.engines
        file = self._built.own(name).file
        return self._load(Model(name, graph.spec(file), file, engines.files, 0, built=True), {})

    def frame_ranges(self, name: str) -> Mapping[str, Range]:
        (ranges,) = self._built.engines.manifest.engines[name].optimisation_profiles.values()
        return ranges

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
