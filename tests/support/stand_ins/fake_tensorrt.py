"""A fake of the TensorRT library, for machines without the library or a GPU. Its engines compute with ONNX Runtime.

Engines read and write the host memory of a `FakeDevice` at the addresses of their tensors, in the order of its
stream. The fake asserts what the library's documentation requires of callers. `Rig` is a pipeline on it, with the
real chain and backend.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from sinkprune import Pipeline
from sinkprune.contract.bundle import Bundle, read_bundle
from sinkprune.contract.engines_manifest import ENGINES, FORMAT_VERSION, EnginesManifest, EngineSpec, Limits
from sinkprune.contract.files.manifest_file import file_specs
from sinkprune.engines.build import small_jobs
from sinkprune.engines.profiles import SmallGraphs, optimisation_profiles
from sinkprune.runtime.backends.compatibility import open_engines
from sinkprune.runtime.backends.tensorrt import TensorRTBackend
from support.stand_ins.fake_device import FakeDevice

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]

VERSION = "10.99.0"
ACTIVATIONS = {"decoder_1": 50_000, "head": 100}
"""Bytes of activations by graph; 2000 for the others."""
LIMITS = Limits(prompt_tokens=60, new_tokens=30, images=1)


TensorIOMode = Enum("TensorIOMode", "INPUT OUTPUT")
TensorLocation = Enum("TensorLocation", "DEVICE HOST")
ExecutionContextAllocationStrategy = Enum("ExecutionContextAllocationStrategy", "STATIC USER_MANAGED")
DynamicShapesKernelSpecializationStrategy = Enum("DynamicShapesKernelSpecializationStrategy", "LAZY EAGER NONE")


class RuntimeConfig:
    """The options of TensorRT-RTX for an execution context."""

    strategy = ExecutionContextAllocationStrategy.STATIC
    dynamic_shapes_kernel_specialization_strategy = DynamicShapesKernelSpecializationStrategy.LAZY

    def set_execution_context_allocation_strategy(self, strategy: ExecutionContextAllocationStrategy) -> None:
        self.strategy = strategy


class ILogger:
    ERROR = 1

    def log(self, severity: int, message: str) -> None:
        raise NotImplementedError


class FakeTensorRT:
    """The module `tensorrt`, bound to a fake device."""

    __version__ = VERSION
    TensorIOMode = TensorIOMode
    TensorLocation = TensorLocation
    ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy
    ILogger = ILogger

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.engines: dict[str, FakeEngine] = {}
        """The deserialised engines, by graph."""

    def Runtime(self, logger: ILogger) -> FakeRuntime:
        return FakeRuntime(self, logger)

    @staticmethod
    def nptype(dtype: np.dtype[Any]) -> type:
        return dtype.type


class FakeTensorRTRTX(FakeTensorRT):
    """The module `tensorrt_rtx`."""

    DynamicShapesKernelSpecializationStrategy = DynamicShapesKernelSpecializationStrategy


class FakeRuntime:
    def __init__(self, library: FakeTensorRT, logger: ILogger) -> None:
        self._library, self._logger = library, logger

    def deserialize_cuda_engine(self, serialized: Any) -> FakeEngine | None:
        try:
            description = json.loads(bytes(serialized))
        except ValueError:
            self._logger.log(2, "a warning")
            self._logger.log(ILogger.ERROR, "the engine is no engine.")
            return None
        # The weights and the code take memory.
        self._library.device.total -= len(serialized)
        engine = FakeEngine(self._library.device, description)
        self._library.engines[description["graph"]] = engine
        return engine


class FakeEngine:
    def __init__(self, device: FakeDevice, description: dict[str, Any]) -> None:
        self.device = device
        self.graph: str = description["graph"]
        self.optimisation_profiles: list[dict[str, list[list[int]]]] = description["optimisation_profiles"]
        self.device_memory_size_v2: int = description["device_memory"]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(description["onnx"], options, providers=["CPUExecutionProvider"])
        self.inputs = {value.name: dtype_of(value.type) for value in self._session.get_inputs()}
        self.outputs = {value.name: dtype_of(value.type) for value in self._session.get_outputs()}
        self.in_place: dict[str, str] = description["in_place"]
        self.contexts: list[FakeContext] = []
        self._shapes: dict[tuple[tuple[str, Shape], ...], dict[str, Shape]] = {}

    @property
    def num_io_tensors(self) -> int:
        return len(self.inputs) + len(self.outputs)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.optimisation_profiles)

    def get_tensor_name(self, number: int) -> str:
        return [*self.inputs, *self.outputs][number]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self.inputs else TensorIOMode.OUTPUT

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.DEVICE

    def get_tensor_dtype(self, name: str) -> np.dtype[Any]:
        return {**self.inputs, **self.outputs}[name]

    def create_runtime_config(self) -> RuntimeConfig:
        return RuntimeConfig()

    def create_execution_context(self, how: ExecutionContextAllocationStrategy | RuntimeConfig) -> FakeContext:
        strategy = how.strategy if isinstance(how, RuntimeConfig) else how
        assert strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        self.contexts.append(FakeContext(self, how))
        return self.contexts[-1]

    def compute(self, shapes: Mapping[str, Shape], addresses: Mapping[str, int], activations: int) -> None:
        """Read the inputs, run, write the outputs, and overwrite the activations."""
        inputs = {name: array_at(addresses[name], shapes[name], dtype) for name, dtype in self.inputs.items()}
        results = self._session.run(list(self.outputs), inputs)
        for name, result in zip(self.outputs, results, strict=True):
            array_at(addresses[name], result.shape, self.outputs[name])[...] = result
        ctypes.memset(activations, 0x5A, self.device_memory_size_v2)

    def output_shapes(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Return the shapes of outputs, by a run on any data: no output shape depends on data."""
        key = tuple(shapes.items())
        if key not in self._shapes:
            inputs = {
                name: (np.arange(shape[0]) if len(shape) == 1 else np.zeros(shape)).astype(self.inputs[name])
                for name, shape in shapes.items()
            }
            results = self._session.run(list(self.outputs), inputs)
            self._shapes[key] = {name: result.shape for name, result in zip(self.outputs, results, strict=True)}
        return self._shapes[key]


class FakeContext:
    """An execution context. `enqueued` has its calls, without replays."""

    def __init__(self, engine: FakeEngine, how: Any) -> None:
        self._engine, self.created_with = engine, how
        self.optimisation_profile: int | None = None
        self._shapes: dict[str, Shape] = {}
        self._addresses: dict[str, int] = {}
        self._up_to_date_for: dict[str, Shape] | None = None
        self.activations = (0, 0)
        self.enqueued: list[tuple[dict[str, Shape], dict[str, int]]] = []

    def set_optimization_profile_async(self, number: int, stream: int) -> bool:
        assert stream == self._engine.device.stream
        self.optimisation_profile = number
        return True

    def set_input_shape(self, name: str, shape: Shape) -> bool:
        assert self.optimisation_profile is not None
        least, _, most = self._engine.optimisation_profiles[self.optimisation_profile][name]
        self._shapes[name] = shape
        return all(low <= size <= high for low, size, high in zip(least, shape, most, strict=True))

    def infer_shapes(self) -> list[str]:
        return [name for name in self._engine.inputs if name not in self._shapes]

    def get_tensor_shape(self, name: str) -> Shape:
        return self._engine.output_shapes({name: self._shapes[name] for name in self._engine.inputs})[name]

    def set_tensor_address(self, name: str, address: int) -> bool:
        # TensorRT rejects a null address, also for an empty tensor.
        assert address != 0
        self._addresses[name] = address
        return True

    def set_device_memory(self, address: int, size: int) -> None:
        assert size >= self._engine.device_memory_size_v2
        self.activations = (address, size)

    def execute_async_v3(self, stream: int) -> bool:
        device = self._engine.device
        assert stream == device.stream
        assert self.activations[0] != 0
        shapes, addresses = dict(self._shapes), dict(self._addresses)
        for name, source in self._engine.in_place.items():
            assert addresses[name] == addresses[source], "a cache and its update are one memory (IKVCacheUpdateLayer)"
        if device.capturing:
            # "Call enqueueV3() once before capturing, to flush deferred updates" (TensorRT's guide on CUDA graphs)
            assert self._up_to_date_for == shapes
        self._up_to_date_for = shapes
        self.enqueued.append((shapes, addresses))
        activations = self.activations[0]
        device.enqueue(lambda: self._engine.compute(shapes, addresses, activations))
        return True


@dataclass(frozen=True)
class FakeBuild:
    """A folder of fake engines and its `engines.json`, for tests that change the file."""

    folder: Path
    manifest: EnginesManifest

    def change(self, **changes: Any) -> None:
        ENGINES.write(self.folder, replace(self.manifest, **changes))


def build_fake_engines(bundle: Bundle, folder: Path, activations: Mapping[str, int] = ACTIVATIONS) -> FakeBuild:
    """Write fake engines of every graph for `LIMITS`, and `engines.json`."""
    engines = {}
    jobs = {
        graph: (bundle.manifest.graphs[graph], bundle.path / bundle.manifest.graphs[graph].file, own)
        for graph, own in optimisation_profiles(bundle.manifest, LIMITS).items()
    }
    for job in small_jobs(SmallGraphs.of(bundle.manifest, LIMITS), folder.parent):
        jobs[job.model.graph] = (job.model.spec, folder.parent / job.model.name, job.optimisation_profiles)
    for graph, (spec, file_of_graph, own) in jobs.items():
        need = activations.get(graph, 2000)
        description = {
            "graph": graph,
            "onnx": str(file_of_graph),
            "optimisation_profiles": [
                {name: [taken.min, taken.opt, taken.max] for name, taken in ranges.items()} for ranges in own.values()
            ],
            "device_memory": need,
            "in_place": {tensor.name: f"past_{tensor.name}" for tensor in spec.outputs if "C" in tensor.shape},
        }
        file = f"engines/{graph}.engine"
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(json.dumps(description))
        engines[graph] = EngineSpec(file, own, {}, need, 0.1)
    manifest = EnginesManifest(
        format_version=FORMAT_VERSION,
        sinkprune_version="0",
        target="tensorrt",
        library_version=VERSION,
        compute_capabilities=(86, 89),
        bundle_sha256=bundle.sha256,
        checkpoint_sha256=bundle.manifest.checkpoint.config_sha256,
        plugins={},
        flags={},
        limits=LIMITS,
        engines=engines,
        files=file_specs(folder),
    )
    ENGINES.write(folder, manifest)
    return FakeBuild(folder, manifest)


def dtype_of(name: str) -> np.dtype[Any]:
    kind = name.removeprefix("tensor(").removesuffix(")")
    return np.dtype("float32" if kind == "float" else kind)


def array_at(address: int, shape: Shape, dtype: np.dtype[Any]) -> Array:
    """Return the array at an address."""
    size = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer((ctypes.c_char * (size * dtype.itemsize)).from_address(address), dtype).reshape(shape)


class Rig:
    """A pipeline on fake engines and a fake device."""

    def __init__(
        self, bundle: Bundle, engines: Path, library: type[FakeTensorRT] = FakeTensorRT, **device: Any
    ) -> None:
        self.device = FakeDevice(**device)
        self.library = library(self.device)
        built = open_engines(engines, bundle)
        self.backend = TensorRTBackend("tensorrt", self.library, self.device, built)
        self.pipeline = Pipeline(bundle, self.backend, built)

    def contexts(self, graph: str) -> list[FakeContext]:
        return self.library.engines[graph].contexts

    @property
    def decoders(self) -> list[str]:
        return [f"decoder_{segment}" for segment in range(len(self.pipeline.chain.decoders))]

    def decode_calls(self) -> set[int]:
        """Return the number of decode calls of each decoder, without replays."""
        return self.calls(1)

    def calls(self, profile: int) -> set[int]:
        """Return the number of calls of each decoder with an optimisation profile, without replays."""
        return {
            sum(len(context.enqueued) for context in self.contexts(graph) if context.optimisation_profile == profile)
            for graph in self.decoders
        }

    def enqueued(self) -> int:
        """Return the number of calls of engines, without replays."""
        return sum(len(context.enqueued) for engine in self.library.engines.values() for context in engine.contexts)

    def clear(self) -> None:
        self.device.calls.clear()
        for engine in self.library.engines.values():
            for context in engine.contexts:
                context.enqueued.clear()


def rig_of(bundle: Path, engines: Path) -> Rig:
    """Write fake engines of a bundle to a new folder, and return a rig of them."""
    opened = read_bundle(bundle)
    build_fake_engines(opened, engines)
    return Rig(opened, engines)
