"""Where TensorRT and TensorRT-RTX differ, as seen by the builder that serves both.

The part for full TensorRT follows its documented Python API and has never been run: that library is not to be had
where this is developed. TensorRT-RTX shares its front end and is run by the tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.engines_manifest import Target
from sinkprune.contract.errors import BackendError, EnginesError, UsageError
from sinkprune.contract.files.output_files import write_whole
from sinkprune.engines.plugin_graph import custom_nodes, for_plugins, has_shape_inputs, read_model
from sinkprune.engines.plugins import registry
from sinkprune.engines.preflight import COPIES, Memory, system_memory
from sinkprune.engines.targets.tensorrt import TensorRTBuilder, export_again
from sinkprune.engines.trt10_checker import check_trt10
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.backends.tensorrt.library import import_tensorrt
from sinkprune.runtime.device import open_device

# The first version whose parser takes RMSNormalization and RotaryEmbedding.
_FIRST_WITH_OPSET24 = (10, 15)
# Orin and Thor, whose GPU uses the machine's memory.
_BOARDS = (87, 110)


class TensorRT(TensorRTBuilder):
    """Full TensorRT, which times kernels on the GPU of this machine and builds for it alone. Never run."""

    target: Target = "tensorrt"

    def __init__(self, timing_cache: Path) -> None:
        """`timing_cache` is a file that builds share. Raises `BackendError` where library or GPU are missing."""
        trt = import_tensorrt("tensorrt")
        self._device, self._timing_cache = open_device(), timing_cache
        flags = {"timing_cache": timing_cache.name, "gpu": self._device.name}
        super().__init__(trt, (self._device.compute_capability,), flags)

    def check_bundle(self, bundle: Bundle) -> None:
        """Refuse fp32 attention, opset 24 before 10.15, and of opset 20 what 10.3 does not parse.

        Raises `EnginesError`.
        """
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

    def memories(self) -> tuple[Memory, ...]:
        """The machine's memory and the GPU's, with what is free of them; on a board they are one."""
        copies = COPIES[self.target]
        if self._device.compute_capability in _BOARDS:
            return system_memory(copies.memory + copies.gpu, activations=True)
        free, _ = self._device.memory()
        return (
            *system_memory(copies.memory, activations=False),
            Memory(f"memory of {self._device.name}", free, copies=copies.gpu, activations=True),
        )

    def fit(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """`model`, its nodes naming plugins, which are registered; as it is where none are shipped for this GPU."""
        if not custom_nodes(model):
            return model
        (sm,) = self.compute_capabilities
        registered = registry.register_for_build(self._trt, sm, shape_inputs=has_shape_inputs(model))
        if registered is None:
            return model
        namespace, needed = registered
        self.plugins |= needed
        return for_plugins(model, _version(self._trt), namespace)

    def network_flags(self) -> int:
        """The flag for strong types before TensorRT 11, and none from there on, where networks always have them."""
        flags = self._trt.NetworkDefinitionCreationFlag
        return 1 << int(flags.STRONGLY_TYPED) if _version(self._trt) < (11, 0) else 0

    def configure(self, config: Any) -> None:
        """Give the build the timing cache, if it is of this version and GPU, or an empty one."""
        cached = self._timing_cache.read_bytes() if self._timing_cache.is_file() else b""
        if not config.set_timing_cache(config.create_timing_cache(cached), ignore_mismatch=False):
            config.set_timing_cache(config.create_timing_cache(b""), ignore_mismatch=False)

    def built(self, config: Any) -> None:
        """Write the timing cache that the build left in `config` to its file."""
        write_whole(self._timing_cache, bytes(memoryview(config.get_timing_cache().serialize())))

    def device_memory(self, serialized: Any, log: Any) -> int | None:
        """Bytes of activations that the engine just built needs: told by loading it, which also shows that it loads.

        Raises `EnginesError` if it does not.
        """
        engine = self._trt.Runtime(log).deserialize_cuda_engine(serialized)
        if engine is None:
            raise EnginesError(f"tensorrt cannot load what it just built: {' '.join(log.errors)}")
        return int(engine.device_memory_size_v2)


class TensorRTRTX(TensorRTBuilder):
    """TensorRT-RTX, which compiles ahead of time for GPUs that need not be here, and to the end where engines load.

    It takes no plugins of users, knows no timing cache, and its networks are always strongly typed.
    """

    target: Target = "tensorrt-rtx"

    def __init__(self, compute_capabilities: tuple[int, ...] | None) -> None:
        """To build for these GPUs, e.g. 86 for sm_86, or for this machine's if None.

        Raises `BackendError` where the library or that GPU is missing, `UsageError` for GPUs it does not build for.
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
        """Name the GPUs to build for, and let callers allocate, so that engines can be captured into CUDA graphs."""
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
            "--sm 86,89,120"
        ) from error


def _version(trt: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in trt.__version__.split(".")[:2])
