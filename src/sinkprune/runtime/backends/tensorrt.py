"""The backend of TensorRT and TensorRT-RTX, its engines, and CUDA graphs of their calls.

Output shapes follow from input shapes, and stream order keeps memory safe, so calls never wait for the device. Never
run on a GPU yet; tested with fakes of the library and the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, lru_cache, partial
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import numpy as np

from sinkprune.contract.checks import install_command
from sinkprune.contract.engines_manifest import EngineSpec, OptimisationProfile, OptimisationProfiles, Range
from sinkprune.contract.errors import BackendError, EnginesError, UsageError
from sinkprune.contract.manifest import CacheForm, GraphSpec
from sinkprune.contract.memory import compared_sizes, gigabytes
from sinkprune.runtime.backends import Backend, Decoder, Engine
from sinkprune.runtime.backends.compatibility import BuiltEngines
from sinkprune.runtime.backends.device_memory import DeviceMemory, DeviceTensor, Shape, Shapes
from sinkprune.runtime.backends.known import KNOWN, Compute
from sinkprune.runtime.backends.kv_cache import BufferedDecoder, cache_names
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.backends.small_graphs import GraphWriter, graphs_of
from sinkprune.runtime.device.captures import Capture, Captures, captured_on_stream
from sinkprune.runtime.device.cuda import Address, Device, open_device
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


# The number of input shapes whose profile and output shapes are cached.
_REMEMBERED = 4096


class Session:
    """The parts that all engines of a TensorRT backend share.

    `address` and `size` (bytes) are those of one block of device memory for the activations of all engines, because
    they run one by one on one stream. The block moves when it grows.
    """

    def __init__(self, library: Any, memory: DeviceMemory, errors: list[str]) -> None:
        """`errors` are TensorRT's errors since the list was last cleared."""
        self.library, self.memory, self.device, self.errors = library, memory, memory.gpu, errors
        self.address: Address = 0
        self.size = 0

    def reserve(self, size: int) -> None:
        """Grow the block to at least `size` bytes; raises a `BackendError` with the needed and free bytes."""
        if size <= self.size:
            return
        if self.size:
            self.device.synchronize()
            self.device.free(self.address)
            self.size = 0
        self.address = self.device.allocate(size)
        self.size = size

    def reason(self) -> str:
        """Return a colon and TensorRT's errors without a full stop, to end a sentence; "" if there are none."""
        return ": " + " ".join(" ".join(self.errors).split()).rstrip(".") if self.errors else ""


class TensorRTEngine:
    """A loaded engine of TensorRT or TensorRT-RTX, called with device tensors by the names of its graph's inputs."""

    def __init__(
        self, graph: str, engine: Any, spec: EngineSpec, session: Session, in_place: Mapping[str, str]
    ) -> None:
        """Prepare `engine`, an `ICudaEngine` of the graph named `graph`, which `spec` describes.

        `in_place` maps outputs to the inputs in whose memory they are written. Raises `BackendError` if `engine` and
        `spec` differ, or where device memory runs out.
        """
        self._graph, self._session, self._in_place = graph, session, in_place
        library = session.library
        names = [engine.get_tensor_name(number) for number in range(engine.num_io_tensors)]
        self._inputs = [name for name in names if engine.get_tensor_mode(name) == library.TensorIOMode.INPUT]
        outputs = [name for name in names if name not in self._inputs]
        self._outputs = {name: np.dtype(library.nptype(engine.get_tensor_dtype(name))) for name in outputs}
        _check_as_listed(graph, library, engine, spec, self._inputs)
        session.reserve(engine.device_memory_size_v2)
        self._optimisation_profiles = [
            _OptimisationProfile(
                name, partial(_context, session, graph, engine, number), ranges, self._inputs, outputs, session
            )
            for number, (name, ranges) in enumerate(spec.optimisation_profiles.items())
        ]
        self._optimisation_profile = lru_cache(_REMEMBERED)(self._choose)

    def __call__(self, inputs: Mapping[str, DeviceTensor]) -> dict[str, DeviceTensor]:
        """Return all outputs by name, from all inputs by name, on the device; they may not be computed yet.

        Raises `BackendError` for shapes that no optimisation profile takes, and where TensorRT fails.
        """
        tensors = [inputs[name] for name in self._inputs]
        shapes = tuple(tensor.shape for tensor in tensors)
        profile, memory = self._optimisation_profile(shapes), self._session.memory
        outputs = []
        for (name, dtype), shape in zip(self._outputs.items(), profile.output_shapes(shapes), strict=True):
            if name in self._in_place:
                outputs.append(inputs[self._in_place[name]])
            else:
                outputs.append(memory.empty(shape, dtype))
        addresses = tuple(tensor.address for tensor in (*tensors, *outputs))
        # Output shapes follow from input shapes.
        key = (profile.name, shapes, addresses, self._session.address)
        memory.captures.run(
            self._graph, key, lambda: profile.enqueue(shapes, addresses), lambda: profile.capture(shapes, addresses)
        )
        return dict(zip(self._outputs, outputs, strict=True))

    def _choose(self, shapes: Shapes) -> _OptimisationProfile:
        """Return the profile that takes these shapes; the last one, narrower (`decode` or `image`), goes first."""
        profile = min(reversed(self._optimisation_profiles), key=lambda profile: profile.distance(shapes))
        if profile.distance(shapes) == 0:
            return profile
        name, shape, taken = profile.misfit(shapes)
        flags = "--max-prompt or --max-new-tokens" if "hidden" in self._inputs else "--max-images"
        raise BackendError(
            f"graph '{self._graph}' was given '{name}' of shape {list(shape)}, its engine's optimisation profile "
            f"'{profile.name}' takes {list(taken.min)} to {list(taken.max)}. Build engines that take it, by a larger "
            f"{flags} of sinkprune-build."
        )


class _OptimisationProfile:
    """An optimisation profile and the execution context that runs it."""

    def __init__(
        self,
        name: str,
        new_context: Callable[..., Any],
        ranges: OptimisationProfile,
        inputs: list[str],
        outputs: list[str],
        session: Session,
    ) -> None:
        self.name, self._new_context = name, new_context
        self._context, self._session = new_context(captured=False), session
        self._inputs, self._outputs = inputs, outputs
        self._ranges = [ranges[tensor] for tensor in inputs]
        self.output_shapes = lru_cache(_REMEMBERED)(self._infer)

    def distance(self, shapes: Shapes) -> int:
        """Return how far shapes are outside the profile's ranges; 0 where it takes them."""
        return sum(_distance(taken, shape) for taken, shape in zip(self._ranges, shapes, strict=True))

    def misfit(self, shapes: Shapes) -> tuple[str, Shape, Range]:
        """Return the first input whose shape is outside its range, this shape and the range."""
        inputs = zip(self._inputs, shapes, self._ranges, strict=True)
        return next((name, shape, taken) for name, shape, taken in inputs if _distance(taken, shape))

    def capture(self, shapes: Shapes, addresses: tuple[Address, ...]) -> Capture:
        """Run a call and capture it, with a context of its own.

        A graph is valid for as long as the context that it was captured from does not change.
        Source: TensorRT's developer guide, "CUDA Graphs".
        """
        context = self._new_context(captured=True)
        made = captured_on_stream(self._session.device, lambda: self.enqueue(shapes, addresses, context))
        return made._replace(held=context)

    def enqueue(self, shapes: Shapes, addresses: tuple[Address, ...], context: Any = None) -> None:
        """Enqueue a call; `addresses` are those of the inputs, then those of the outputs."""
        context = context or self._context
        self._session.errors.clear()
        self._set_shapes(context, shapes)
        for name, address in zip((*self._inputs, *self._outputs), addresses, strict=True):
            context.set_tensor_address(name, address)
        context.set_device_memory(self._session.address, self._session.size)
        if not context.execute_async_v3(self._session.device.stream):
            raise BackendError(f"TensorRT refused to enqueue an engine{self._session.reason()}.")

    def _infer(self, shapes: Shapes) -> Shapes:
        self._set_shapes(self._context, shapes)
        unknown = self._context.infer_shapes()
        if unknown:
            raise BackendError(
                f"TensorRT cannot tell output shapes before it runs, for want of {', '.join(unknown)}."
            )
        return tuple(tuple(self._context.get_tensor_shape(name)) for name in self._outputs)

    def _set_shapes(self, context: Any, shapes: Shapes) -> None:
        for name, shape in zip(self._inputs, shapes, strict=True):
            if not context.set_input_shape(name, shape):
                raise BackendError(
                    f"TensorRT does not take shape {list(shape)} for input '{name}'{self._session.reason()}."
                )


def _context(session: Session, graph: str, engine: Any, number: int, *, captured: bool) -> Any:
    """Return an execution context of an optimisation profile, without activation memory of its own."""
    library, device = session.library, session.device
    strategy: Any = library.ExecutionContextAllocationStrategy.USER_MANAGED
    if hasattr(library, "DynamicShapesKernelSpecializationStrategy"):
        # Otherwise TensorRT-RTX would swap in kernels compiled for a shape later, which captured graphs miss.
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(strategy)
        if captured:
            config.dynamic_shapes_kernel_specialization_strategy = (
                library.DynamicShapesKernelSpecializationStrategy.NONE
            )
        strategy = config
    context = engine.create_execution_context(strategy)
    if context is None or not context.set_optimization_profile_async(number, device.stream):
        free, total = device.memory()
        raise BackendError(
            f"no execution context for '{graph}' on {device.name}, with {free / 1e6:.1f} of {total / 1e6:.1f} MB free"
            f"{session.reason()}."
        )
    return context


def _check_as_listed(graph: str, library: Any, engine: Any, spec: EngineSpec, inputs: list[str]) -> None:
    """Check that the engine has the inputs that engines.json lists, all in device memory; raises `BackendError`."""
    listed = [sorted(ranges) for ranges in spec.optimisation_profiles.values()]
    if listed != [sorted(inputs)] * engine.num_optimization_profiles:
        raise BackendError(
            f"the engine of '{graph}' has {engine.num_optimization_profiles} optimisation profiles of the inputs "
            f"{', '.join(inputs)}, which is not what engines.json lists. Build or copy the engines again."
        )
    on_host = [name for name in inputs if engine.get_tensor_location(name) != library.TensorLocation.DEVICE]
    if on_host:
        raise BackendError(
            f"the engine of '{graph}' takes '{on_host[0]}' in host memory, as the size of something; tensors are in "
            "device memory. This is a mistake of the graph: please report it."
        )


def _distance(taken: Range, shape: Shape) -> int:
    sizes = zip(taken.min, shape, taken.max, strict=True)
    return sum(max(least - size, size - most, 0) for least, size, most in sizes)


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
        self._session = Session(library, self, log.errors)
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
