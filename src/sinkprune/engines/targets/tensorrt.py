"""Engines of TensorRT and TensorRT-RTX.

The class for full TensorRT follows its documented Python API and has never run, because the library needs a GPU. The
tests run TensorRT-RTX, which has the same front end.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import onnx

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.engines_manifest import Target
from sinkprune.contract.errors import BackendError, EnginesError, OutOfMemoryError, UsageError
from sinkprune.contract.files.output_files import write_whole
from sinkprune.contract.manifest import Manifest, TensorSpec
from sinkprune.engines.plugin_graph import custom_nodes, for_plugins, layers, read_model, realisations
from sinkprune.engines.plugins import plugin_v3 as registry
from sinkprune.engines.progress import BuildProgress, interrupts_noted, new_monitor
from sinkprune.engines.targets import COPIES, Builder, BuildJob, BuildMemory, EngineFacts, system_memory
from sinkprune.runtime.backends.kv_cache import cache_names
from sinkprune.runtime.backends.tensorrt import fixed_room, import_tensorrt, new_error_log
from sinkprune.runtime.device.cuda import open_device


class TensorRTBuilder(Builder):
    """The common part of both libraries; each has a subclass."""

    suffix, small_graphs = ".engine", True

    def __init__(self, trt: Any, compute_capabilities: tuple[int, ...], flags: dict[str, str]) -> None:
        """Build with the module `trt` for GPUs of these compute capabilities. `flags` are for `engines.json`."""
        super().__init__()
        self._trt = trt
        self.library_version = trt.__version__
        self.compute_capabilities = compute_capabilities
        self.flags = {"strongly_typed": "true", **flags}

    def check_bundle(self, bundle: Bundle) -> None:
        weights = bundle.manifest.weights
        if bundle.manifest.precision == "fp32" and bundle.manifest.dialect == "opset24":
            raise EnginesError(
                f"bundle '{bundle.path}' is fp32, and {self.target} compiles ONNX's Attention in fp16 only. "
                f"{export_again(bundle.manifest, dialect='opset24')}"
            )
        for option, form in (("--weights", weights.decoder), ("--vision-weights", weights.vision)):
            if form == "uint4":
                raise EnginesError(
                    f"bundle '{bundle.path}' has uint4 weights, and {self.target} takes no zero points. "
                    f"{export_again(bundle.manifest, dialect=bundle.manifest.dialect)} {option} int4"
                )

    def fit(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """Return the graph `model` as this library must parse it. The original does not change."""
        return model

    def network_flags(self) -> int:
        """Return the flags for `create_network` that make a network strongly typed."""
        return 0

    def configure(self, config: Any) -> None:
        """Set what is particular to the library in a builder configuration."""

    def keep_timings(self, config: Any) -> None:
        """Save what a build left in its configuration for the next build."""

    def device_memory(self, serialized: Any, log: Any) -> int | None:
        """Return the bytes of activations that the new engine needs; None if that takes a GPU."""
        return None

    def build(self, job: BuildJob, output: Path, progress: BuildProgress) -> EngineFacts:
        """Write the engine of one graph to the file `output`; raises `EnginesError`.

        The parsed network must have the inputs and outputs of the bundle. Ctrl-C ends the build with
        `KeyboardInterrupt`.
        """
        model = with_fixed_room(self.fit(read_model(job.model)), job)
        log = new_error_log(self._trt)
        builder = self._trt.Builder(log)
        network = builder.create_network(self.network_flags())
        self._parse(job, model, network, log)
        self._check_interface(job, network)
        nodes = realisations(model, network, self._trt)
        config = builder.create_builder_config()
        self.configure(config)
        if job.exact_fp32:
            config.clear_flag(self._trt.BuilderFlag.TF32)
        self._add_optimisation_profiles(job, builder, config, log)
        with interrupts_noted() as interrupted:
            # The builder holds no reference to the monitor.
            monitor = new_monitor(self._trt, progress, interrupted)
            config.progress_monitor = monitor
            engine = self._compile(job, builder, network, config, log)
        self.keep_timings(config)
        output.write_bytes(memoryview(engine))
        return EngineFacts(nodes, self.device_memory(engine, log))

    def _parse(self, job: BuildJob, model: onnx.ModelProto, network: Any, log: Any) -> None:
        parser = self._trt.OnnxParser(network, log)
        # The parser looks for weights in the folder of the path.
        with job.model.by_path() as path:
            parsed = parser.parse(model.SerializeToString(), str(path))
        if parsed:
            return
        errors = [parser.get_error(number) for number in range(parser.num_errors)]
        nodes = "; ".join(f"node '{error.node_name()}' ({error.node_operator()}): {error.desc()}" for error in errors)
        raise EnginesError(
            f"{self.target} {self.library_version} does not parse graph '{job.model.graph}': {nodes or _words(log)}. "
            "Export the bundle in another --dialect, or use another version of the library."
        )

    def _check_interface(self, job: BuildJob, network: Any) -> None:
        """Raise `EnginesError` unless the network has the bundle's inputs and outputs, and reads every input.

        TensorRT accepts an input that no layer reads without a message.
        """
        inputs = [network.get_input(number) for number in range(network.num_inputs)]
        outputs = [network.get_output(number) for number in range(network.num_outputs)]
        bundle = job.model.spec
        for role, found, expected in (("input", inputs, bundle.inputs), ("output", outputs, bundle.outputs)):
            names, wanted = [tensor.name for tensor in found], [tensor.name for tensor in expected]
            if sorted(names) != sorted(wanted):
                raise EnginesError(
                    f"graph '{job.model.graph}': {self.target} found the {role}s {', '.join(names)}, the bundle "
                    f"expects {', '.join(wanted)}. Export the bundle again."
                )
            by_name = {tensor.name: tensor for tensor in found}
            for spec in expected:
                self._check_tensor(job.model.graph, role, by_name[spec.name], spec)
        taken = [layer.get_input(place) for layer in layers(network) for place in range(layer.num_inputs)]
        read = {tensor.name for tensor in taken if tensor is not None}
        unread = [tensor.name for tensor in inputs if tensor.name not in read]
        if unread:
            raise EnginesError(
                f"graph '{job.model.graph}': no layer reads the input '{unread[0]}', so the engine would ignore it. "
                "Export the bundle again; if that does not help, it is an error of sinkprune-export."
            )

    def _check_tensor(self, graph: str, role: str, found: Any, expected: TensorSpec) -> None:
        trt = self._trt
        dtypes = {getattr(trt, name): name for name in ("float32", "float16", "int64", "bool", "uint8")}
        shape = [None if size < 0 else size for size in found.shape]
        fits = len(shape) == len(expected.shape) and all(
            size is None or isinstance(wanted, str) or size == wanted
            for size, wanted in zip(shape, expected.shape, strict=True)
        )
        if dtypes.get(found.dtype) != expected.dtype or not fits:
            raise EnginesError(
                f"graph '{graph}': for {self.target} its {role} '{found.name}' is {found.dtype} "
                f"{tuple(found.shape)}, the bundle expects {expected.dtype} {list(expected.shape)}. Export it again."
            )

    def _add_optimisation_profiles(self, job: BuildJob, builder: Any, config: Any, log: Any) -> None:
        for name, ranges in job.optimisation_profiles.items():
            profile = builder.create_optimization_profile()
            for tensor, shapes in ranges.items():
                profile.set_shape(tensor, shapes.min, shapes.opt, shapes.max)
            if config.add_optimization_profile(profile) < 0:
                raise EnginesError(
                    f"graph '{job.model.graph}': {self.target} refuses the optimisation profile '{name}': "
                    f"{_words(log)}."
                )

    def _compile(self, job: BuildJob, builder: Any, network: Any, config: Any, log: Any) -> Any:
        failed = f"{self.target} {self.library_version} cannot build graph '{job.model.graph}'"
        try:
            engine = builder.build_serialized_network(network, config)
        except MemoryError as error:
            raise OutOfMemoryError(f"{failed}: it ran out of memory") from error
        if engine is None:
            words = _words(log)
            kind = OutOfMemoryError if "memory" in words.lower() else EnginesError
            raise kind(f"{failed}: {words}.")
        return engine


def with_fixed_room(model: onnx.ModelProto, job: BuildJob) -> onnx.ModelProto:
    """Return `model` with the size of its caches if they have one size only. The original does not change.

    TensorRT needs the size before it compiles updates of the caches in place.
    """
    room = fixed_room(job.model.spec, job.optimisation_profiles)
    if room is None:
        return model
    fixed = deepcopy(model)
    caches = set(cache_names(job.model.spec).values())
    for value in fixed.graph.input:
        if value.name in caches:
            value.type.tensor_type.shape.dim[2].dim_value = room
    return fixed


def export_again(manifest: Manifest, *, dialect: str) -> str:
    """Return the advice for a bundle that a library does not accept: the command that exports it in fp16."""
    source, random = manifest.checkpoint.source, " --random-weights" if manifest.checkpoint.random_weights else ""
    return f"Export it again: sinkprune-export {source} -o BUNDLE --precision fp16 --dialect {dialect}{random}"


def _words(log: Any) -> str:
    # Without a GPU, an error about the missing GPU follows each error.
    errors = [message for message in log.errors if "catchCudaError" not in message]
    return " ".join(" ".join(errors or log.errors).split()).removesuffix(".") or "it gave no reason"


# The first version whose parser takes RMSNormalization and RotaryEmbedding.
_FIRST_WITH_OPSET24 = (10, 15)
# The compute capabilities of Orin and Thor, whose GPU uses the machine's memory.
_BOARDS = (87, 110)


class TensorRT(TensorRTBuilder):
    """Builds with full TensorRT, which times kernels on this machine's GPU and builds for it alone. Never run."""

    target: Target = "tensorrt"

    def __init__(self, timing_cache: Path) -> None:
        """Share the file `timing_cache` between builds. Raises `BackendError` if the library or a GPU is missing."""
        trt = import_tensorrt("tensorrt")
        self._device, self._timing_cache = open_device(), timing_cache
        flags = {"timing_cache": timing_cache.name, "gpu": self._device.name}
        super().__init__(trt, (self._device.compute_capability,), flags)

    def check_bundle(self, bundle: Bundle) -> None:
        super().check_bundle(bundle)
        manifest = bundle.manifest
        if manifest.dialect == "opset24" and _version(self._trt) < _FIRST_WITH_OPSET24:
            raise EnginesError(
                f"bundle '{bundle.path}' is of dialect opset24, which needs TensorRT 10.15 or later; "
                f"{self._trt.__version__} is installed here. {export_again(manifest, dialect='opset20')}"
            )

    def memories(self) -> tuple[BuildMemory, ...]:
        copies = COPIES[self.target]
        if self._device.compute_capability in _BOARDS:
            return system_memory(copies.memory + copies.gpu, activations=True)
        free, _ = self._device.memory()
        return (
            *system_memory(copies.memory, activations=False),
            BuildMemory(f"memory of {self._device.name}", free, copies=copies.gpu, activations=True),
        )

    def fit(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """Return `model` with nodes that name registered plugins, or `model` if none are shipped for this GPU."""
        if not custom_nodes(model):
            return model
        (sm,) = self.compute_capabilities
        needed = registry.register_for_build(self._trt, sm)
        if needed is None:
            return model
        self.plugins |= needed
        return for_plugins(model, _version(self._trt))

    def network_flags(self) -> int:
        """Return the flag for strong types before TensorRT 11; later networks always have them."""
        flags = self._trt.NetworkDefinitionCreationFlag
        return 1 << int(flags.STRONGLY_TYPED) if _version(self._trt) < (11, 0) else 0

    def configure(self, config: Any) -> None:
        cached = self._timing_cache.read_bytes() if self._timing_cache.is_file() else b""
        if not config.set_timing_cache(config.create_timing_cache(cached), ignore_mismatch=False):
            config.set_timing_cache(config.create_timing_cache(b""), ignore_mismatch=False)

    def keep_timings(self, config: Any) -> None:
        write_whole(self._timing_cache, bytes(memoryview(config.get_timing_cache().serialize())))

    def device_memory(self, serialized: Any, log: Any) -> int | None:
        """Load the new engine and return its bytes of activations. Raises `EnginesError` if it does not load."""
        engine = self._trt.Runtime(log).deserialize_cuda_engine(serialized)
        if engine is None:
            raise EnginesError(f"tensorrt cannot load what it just built: {' '.join(log.errors)}")
        return int(engine.device_memory_size_v2)


class TensorRTRTX(TensorRTBuilder):
    """Builds with TensorRT-RTX, which compiles ahead of time for GPUs of other machines, and finishes at load time.

    It takes no plugins of users and has no timing cache. Its networks are always strongly typed.
    """

    target: Target = "tensorrt-rtx"

    def __init__(self, compute_capabilities: tuple[int, ...] | None) -> None:
        """Build for these GPUs, e.g. 86 for sm_86, or for this machine's if None.

        Raises `BackendError` if the library or that GPU is missing, `UsageError` for GPUs that it does not build for.
        """
        trt = import_tensorrt("tensorrt-rtx")
        known = trt.ComputeCapability.__members__
        self._members = {int(name[2:]): member for name, member in known.items() if name.startswith("SM")}
        gpus = _this_gpu() if compute_capabilities is None else compute_capabilities
        super().__init__(trt, gpus, {"require_user_allocation": "true"})
        for capability in self.compute_capabilities:
            if capability not in self._members:
                raise UsageError(
                    f"tensorrt-rtx {self._trt.__version__} does not build for sm_{capability}; it does for: "
                    f"{', '.join(map(str, self._members))}. For other GPUs use --target tensorrt on the machine."
                )

    def configure(self, config: Any) -> None:
        """Set the GPUs, and let callers allocate memory: CUDA graphs can then capture the engines."""
        config.set_flag(self._trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
        config.num_compute_capabilities = len(self.compute_capabilities)
        for number, capability in enumerate(self.compute_capabilities):
            config.set_compute_capability(self._members[capability], number)


def _this_gpu() -> tuple[int, ...]:
    try:
        return (open_device().compute_capability,)
    except BackendError as error:
        raise BackendError(
            f"no GPU was named and none found here: {error} To build for other machines, name their GPUs, as in: "
            "--sm 86,89,120. To build for this machine's processor: --target onnxruntime"
        ) from error


def _version(trt: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in trt.__version__.split(".")[:2])
