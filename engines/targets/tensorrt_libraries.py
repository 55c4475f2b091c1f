"""Where TensorRT and TensorRT-RTX differ, as seen by the builder that serves both.

The part for full TensorRT follows its documented Python API and has never been run: that library is not to be had
where this is developed. TensorRT-RTX shares its front end and is run by the tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.engines_manifest import Target
from sinkprune.contract.errors import BackendError, EnginesError, UsageError
from sinkprune.contract.files import write_whole
from sinkprune.contract.manifest import Manifest
from sinkprune.engines.onnx_model import read_model
from sinkprune.engines.preflight import Memory, system_memory
from sinkprune.runtime.device import open_device
from sinkprune.runtime.tensorrt_library import import_tensorrt

if TYPE_CHECKING:
    import onnx

# Measured with TensorRT-RTX 1.7: 2.2 times the weights at the peak, the engine among them.
_HOST_COPIES = 2.2
# The least there must be, to time kernels on them.
_GPU_COPIES = 1
# The first version whose parser takes RMSNormalization and RotaryEmbedding.
_FIRST_WITH_OPSET23 = (10, 15)
# Orin and Thor, whose GPU uses the machine's memory.
_BOARDS = (87, 110)


class Library(Protocol):
    """TensorRT or TensorRT-RTX, with what the one does otherwise than the other when it builds.

    What it has in common with `EnginesManifest` is what `engines.json` tells.
    """

    target: Target
    trt: Any
    """The library's Python module."""
    compute_capabilities: tuple[int, ...]
    flags: dict[str, str]
    plugins: dict[str, str]
    """The plugins that engines built so far need when they are loaded: sha256 of the kernels by plugin name."""

    def check_bundle(self, bundle: Bundle) -> None:
        """Refuse a bundle that this library, in this version, cannot build; raises `EnginesError`."""
        ...

    def memories(self) -> tuple[Memory, ...]:
        """The memories that building takes from, and how much of each is free."""
        ...

    def fit(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """The graph `model` as this library is to parse it; the original is left alone."""
        ...

    def network_flags(self) -> int:
        """The flags for `create_network` that make a network strongly typed."""
        ...

    def configure(self, config: Any) -> None:
        """Set in a builder configuration what the two libraries do not have alike."""
        ...

    def built(self, config: Any) -> None:
        """Keep what a build left in its configuration, for the next."""
        ...

    def device_memory(self, serialized: Any, log: Any) -> int | None:
        """Bytes of activations that the engine just built needs; None where there is no GPU to ask."""
        ...


class TensorRT:
    """Full TensorRT, which times kernels on the GPU of this machine and builds for it alone. Never run."""

    target: Target = "tensorrt"

    def __init__(self, timing_cache: Path) -> None:
        """`timing_cache` is a file that builds share. Raises `BackendError` where library or GPU are missing."""
        self.trt = import_tensorrt("tensorrt")
        self._device = open_device()
        self._timing_cache = timing_cache
        self.compute_capabilities: tuple[int, ...] = (self._device.compute_capability,)
        self.flags = {"strongly_typed": "true", "timing_cache": timing_cache.name, "gpu": self._device.name}
        self.plugins: dict[str, str] = {}

    def check_bundle(self, bundle: Bundle) -> None:
        """Refuse fp32 attention, opset 23 before 10.15, and of opset 20 what 10.3 does not parse.

        Raises `EnginesError`.
        """
        _refuse_fp32_attention(bundle, self.target)
        manifest = bundle.manifest
        if manifest.dialect == "opset23" and _version(self.trt) < _FIRST_WITH_OPSET23:
            raise EnginesError(
                f"bundle '{bundle.path}' is of dialect opset23, which needs TensorRT 10.15 or later; "
                f"{self.trt.__version__} is installed here. {_export_again(manifest, 'fp16', 'opset20')}"
            )
        if manifest.dialect == "opset20":
            models = {graph: read_model(bundle.graph_path(graph)) for graph in manifest.graphs}
            from sinkprune.engines.trt10_checker import check_trt10

            for graph, model in models.items():
                check_trt10(model, graph)

    def memories(self) -> tuple[Memory, ...]:
        """The machine's memory and the GPU's, with what is free of them; on a board they are one."""
        if self._device.compute_capability in _BOARDS:
            return system_memory(_HOST_COPIES + _GPU_COPIES, activations=True)
        free, _ = self._device.memory()
        return (
            *system_memory(_HOST_COPIES, activations=False),
            Memory(f"memory of {self._device.name}", free, copies=_GPU_COPIES, activations=True),
        )

    def fit(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """`model`, its nodes naming plugins, which are registered; as it is where none are shipped for this GPU."""
        from sinkprune.engines.plugin_graph import custom_nodes, for_plugins, has_shape_inputs
        from sinkprune.engines.plugins.registry import register_for_build

        if not custom_nodes(model):
            return model
        (sm,) = self.compute_capabilities
        registered = register_for_build(self.trt, sm, shape_inputs=has_shape_inputs(model))
        if registered is None:
            return model
        self.plugins |= registered.needed
        return for_plugins(model, _version(self.trt), registered.namespace)

    def network_flags(self) -> int:
        """The flag for strong types before TensorRT 11, and none from there on, where networks always have them."""
        flags = self.trt.NetworkDefinitionCreationFlag
        return 1 << int(flags.STRONGLY_TYPED) if _version(self.trt) < (11, 0) else 0

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
        engine = self.trt.Runtime(log).deserialize_cuda_engine(serialized)
        if engine is None:
            raise EnginesError(f"tensorrt cannot load what it just built: {' '.join(log.errors)}")
        return int(engine.device_memory_size_v2)


class TensorRTRTX:
    """TensorRT-RTX, which compiles ahead of time for GPUs that need not be here, and knows no timing cache."""

    target: Target = "tensorrt-rtx"

    def __init__(self, compute_capabilities: tuple[int, ...] | None) -> None:
        """To build for these GPUs, e.g. 86 for sm_86, or for this machine's if None.

        Raises `BackendError` where the library or that GPU is missing, `UsageError` for GPUs it does not build for.
        """
        self.trt = import_tensorrt("tensorrt-rtx")
        known = self.trt.ComputeCapability.__members__
        self._members = {int(name[2:]): member for name, member in known.items() if name.startswith("SM")}
        self.compute_capabilities = _this_gpu() if compute_capabilities is None else compute_capabilities
        for capability in self.compute_capabilities:
            if capability not in self._members:
                raise UsageError(
                    f"tensorrt-rtx {self.trt.__version__} does not build for sm_{capability}; it does for: "
                    f"{', '.join(map(str, self._members))}. For other GPUs use --target tensorrt on the machine."
                )
        self.flags = {"strongly_typed": "true", "require_user_allocation": "true"}
        self.plugins: dict[str, str] = {}

    def check_bundle(self, bundle: Bundle) -> None:
        """Refuse a bundle whose attention is in fp32, which does not build; raises `EnginesError`."""
        _refuse_fp32_attention(bundle, self.target)

    def memories(self) -> tuple[Memory, ...]:
        """The machine's memory, with what is free of it: no GPU takes part."""
        return system_memory(_HOST_COPIES, activations=False)

    def fit(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """`model` as it is: TensorRT-RTX takes no plugins of users."""
        return model

    def network_flags(self) -> int:
        """No flags: networks of TensorRT-RTX are always strongly typed."""
        return 0

    def configure(self, config: Any) -> None:
        """Name the GPUs to build for, and let callers allocate, so that engines can be captured into CUDA graphs."""
        config.set_flag(self.trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
        config.num_compute_capabilities = len(self.compute_capabilities)
        for number, capability in enumerate(self.compute_capabilities):
            config.set_compute_capability(self._members[capability], number)

    def built(self, config: Any) -> None:
        """Does nothing: TensorRT-RTX leaves nothing to keep."""

    def device_memory(self, serialized: Any, log: Any) -> int | None:
        """None, for unknown: the engine is compiled to the end where it is loaded."""
        return None


def _refuse_fp32_attention(bundle: Bundle, target: str) -> None:
    manifest = bundle.manifest
    if manifest.precision == "fp32" and manifest.dialect == "opset23":
        raise EnginesError(
            f"bundle '{bundle.path}' is fp32, and {target} compiles ONNX's Attention in fp16 only. "
            f"{_export_again(manifest, 'fp16', 'opset23')}"
        )


def _export_again(manifest: Manifest, precision: str, dialect: str) -> str:
    checkpoint = manifest.checkpoint
    random = " --random-weights" if checkpoint.random_weights else ""
    return (
        f"Export it again: sinkprune-export {checkpoint.source} -o BUNDLE --precision {precision} --dialect {dialect}"
        f"{random}"
    )


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
