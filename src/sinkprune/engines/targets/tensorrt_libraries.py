"""The builders of TensorRT and TensorRT-RTX: what differs between the two libraries.

The class for full TensorRT follows its documented Python API and has never run, because the library needs a GPU. The
tests run TensorRT-RTX, which has the same front end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.engines_manifest import Target
from sinkprune.contract.errors import BackendError, EnginesError, UsageError
from sinkprune.contract.files.output_files import write_whole
from sinkprune.engines.plugin_graph import custom_nodes, for_plugins, read_model
from sinkprune.engines.plugins import registry
from sinkprune.engines.preflight import COPIES, BuildMemory, system_memory
from sinkprune.engines.targets.tensorrt import TensorRTBuilder, export_again
from sinkprune.engines.trt10_checker import check_trt10
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.backends.tensorrt.library import import_tensorrt
from sinkprune.runtime.device import open_device

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
        """Raise `EnginesError` for fp32 attention, opset 24 before 10.15, and nodes that 10.3 does not parse."""
        super().check_bundle(bundle)
        manifest = bundle.manifest
        if manifest.dialect == "opset24" and _version(self._trt) < _FIRST_WITH_OPSET24:
            raise EnginesError(
                f"bundle '{bundle.path}' is of dialect opset24, which needs TensorRT 10.15 or later; "
                f"{self._trt.__version__} is installed here. {export_again(manifest, dialect='opset20')}"
            )
        if manifest.dialect == "opset20":
            for graph in manifest.graphs:
                check_trt10(read_model(Model.of_bundle(bundle, graph)), graph)

    def memories(self) -> tuple[BuildMemory, ...]:
        """Return the machine's memory and the GPU's; on a board they are one."""
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
        """Set the timing cache if it is of this version and GPU, or else an empty one."""
        cached = self._timing_cache.read_bytes() if self._timing_cache.is_file() else b""
        if not config.set_timing_cache(config.create_timing_cache(cached), ignore_mismatch=False):
            config.set_timing_cache(config.create_timing_cache(b""), ignore_mismatch=False)

    def keep_timings(self, config: Any) -> None:
        """Write the timing cache in `config` to its file."""
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
