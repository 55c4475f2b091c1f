"""TensorRT's engines, and CUDA graphs of their calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from sinkprune.contract.engines_manifest import EngineSpec, OptimisationProfile, Range
from sinkprune.contract.errors import BackendError
from sinkprune.runtime.backends.device_memory import DeviceMemory, DeviceTensor, Shape, Shapes
from sinkprune.runtime.device.captures import Capture, captured_on_stream
from sinkprune.runtime.device.cuda import Address, Device

# The number of input shapes whose profile and output shapes are cached.
_REMEMBERED = 4096


class ActivationMemory:
    """Device memory for the activations of all engines: one block, because engines run one by one on one stream.

    `address` and `size` (bytes) are those of the block, which moves when it grows.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.address: Address = 0
        self.size = 0

    def reserve(self, size: int) -> None:
        """Grow the block to at least `size` bytes; raises a `BackendError` with the needed and free bytes."""
        if size <= self.size:
            return
        if self.size:
            self._device.synchronize()
            self._device.free(self.address)
            self.size = 0
        self.address = self._device.allocate(size)
        self.size = size


@dataclass(frozen=True)
class Session:
    """The parts that all engines of a TensorRT backend share."""

    library: Any
    memory: DeviceMemory
    activations: ActivationMemory
    errors: list[str]
    """TensorRT's errors since the list was last cleared."""

    @property
    def device(self) -> Device:
        """The device that all engines run on."""
        return self.memory.gpu

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
        session.activations.reserve(engine.device_memory_size_v2)
        self._optimisation_profiles = [
            _OptimisationProfile(graph, engine, number, name, ranges, self._inputs, outputs, session)
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
        key = (profile.name, shapes, addresses, self._session.activations.address)
        memory.captures.run(
            self._graph,
            key,
            lambda: profile.enqueue(shapes, addresses),
            lambda: profile.capture(shapes, addresses),
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
        graph: str,
        engine: Any,
        number: int,
        name: str,
        ranges: OptimisationProfile,
        inputs: list[str],
        outputs: list[str],
        session: Session,
    ) -> None:
        self.name = name
        self._new_context = partial(_context, session, graph, engine, number)
        self._context, self._session = self._new_context(captured=False), session
        self._inputs, self._outputs = inputs, outputs
        self._ranges = [ranges[tensor] for tensor in inputs]
        self.output_shapes = lru_cache(_REMEMBERED)(self._infer)

    def distance(self, shapes: Shapes) -> int:
        """Return how far shapes are outside the profile's ranges; 0 where it takes them."""
        return sum(_distance(taken, shape) for taken, shape in zip(self._ranges, shapes, strict=True))

    def misfit(self, shapes: Shapes) -> tuple[str, Shape, Range]:
        """Return the first input whose shape is out of range, its shape, and the range."""
        inputs = zip(self._inputs, shapes, self._ranges, strict=True)
        return next((name, shape, taken) for name, shape, taken in inputs if _distance(taken, shape))

    def enqueue(self, shapes: Shapes, addresses: tuple[Address, ...]) -> None:
        """Enqueue a call; `addresses` are those of the inputs, then those of the outputs."""
        self._enqueue(self._context, shapes, addresses)

    def capture(self, shapes: Shapes, addresses: tuple[Address, ...]) -> Capture:
        """Run a call and capture it, with a context of its own.

        A graph is valid for as long as the context that it was captured from does not change.
        Source: TensorRT's developer guide, "CUDA Graphs".
        """
        context = self._new_context(captured=True)
        made = captured_on_stream(self._session.device, lambda: self._enqueue(context, shapes, addresses))
        return made._replace(held=context)

    def _enqueue(self, context: Any, shapes: Shapes, addresses: tuple[Address, ...]) -> None:
        activations = self._session.activations
        self._session.errors.clear()
        self._set_shapes(context, shapes)
        for name, address in zip((*self._inputs, *self._outputs), addresses, strict=True):
            context.set_tensor_address(name, address)
        context.set_device_memory(activations.address, activations.size)
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
