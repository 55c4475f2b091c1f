"""Libraries that build engines, behind one small interface. Adding one is a module here and its name below."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, get_args

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.engines_manifest import OptimisationProfiles, Realisation, Target
from sinkprune.contract.errors import BackendError, UsageError
from sinkprune.engines.preflight import Memory
from sinkprune.engines.progress import BuildProgress
from sinkprune.runtime.backends.models import Model

TARGETS: tuple[Target, ...] = get_args(Target)
"""The libraries that engines can be built by, as `sinkprune-build --target` names them."""


@dataclass(frozen=True)
class Job:
    """One graph that an engine is to be built of."""

    model: Model
    """Its ONNX file, with its weights beside it, and what it must take and give."""
    optimisation_profiles: OptimisationProfiles
    """The shapes the engine is to take."""


@dataclass(frozen=True)
class Built:
    """What a builder tells of the engine it built of a graph."""

    optimisation_profiles: OptimisationProfiles
    """The shapes the engine takes."""
    nodes: dict[str, Realisation]
    """What became of each node of domain `sinkprune`, by the node's name."""
    device_memory: int | None
    """Bytes of activations the engine needs when it runs; None where the library does not tell."""


class Builder(Protocol):
    """A library that builds engines; what it has in common with `EnginesManifest` is what `engines.json` tells."""

    target: Target
    library_version: str
    compute_capabilities: tuple[int, ...]
    flags: dict[str, str]
    disk_copies: float
    """How many times the weights of a graph its engine's files hold, at most."""
    plugins: dict[str, str]
    """The plugins that the engines built so far call when they run: sha256 of the kernels by plugin name."""

    def file_name(self, graph: str) -> str:
        """The name of the file that holds the engine of `graph`, e.g. "vision.engine"."""
        ...

    def check_bundle(self, bundle: Bundle) -> None:
        """Refuse a bundle that this library, in this version, cannot build; raises `EnginesError`."""
        ...

    def memories(self) -> tuple[Memory, ...]:
        """The memories that building takes from, and how much of each is free."""
        ...

    def build(self, job: Job, output: Path, progress: BuildProgress) -> Built:
        """Write the engine of one graph to the file `output`, and tell `progress` of the library's own phases.

        Raises `EnginesError`; `OutOfMemoryError`, which is one, where memory was what it lacked.
        """
        ...


def new_builder(target: str, compute_capabilities: tuple[int, ...] | None, timing_cache: Path) -> Builder:
    """The builder for `target`, one of `TARGETS`.

    `compute_capabilities`, e.g. 86 for sm_86, are what tensorrt-rtx compiles for; None means this machine's GPU.
    `timing_cache` is a file that tensorrt reads and writes. Raises `UsageError`, and `BackendError` where the library
    or a GPU that it needs is missing.
    """
    if target not in TARGETS:
        raise UsageError(f"unknown target '{target}'; known targets: {', '.join(TARGETS)}.")
    if compute_capabilities is not None and target != "tensorrt-rtx":
        where = "the GPU of this machine" if target == "tensorrt" else "the processor of this machine"
        raise UsageError(
            f"--sm is for target tensorrt-rtx, which compiles ahead for other GPUs; target {target} builds for "
            f"{where}. Leave --sm out."
        )
    try:
        from sinkprune.engines.targets.onnxruntime import OnnxRuntimeBuilder
        from sinkprune.engines.targets.onnxruntime_with_openvino import OnnxRuntimeWithOpenVinoBuilder
        from sinkprune.engines.targets.openvino import OpenVinoBuilder
        from sinkprune.engines.targets.tensorrt_libraries import TensorRT, TensorRTRTX
    except ImportError as error:
        if error.name not in ("onnx", "google", "google.protobuf"):
            raise
        raise BackendError(
            "building engines needs the package onnx, which is not installed. Install it with: pip install onnx"
        ) from error
    if target == "onnxruntime":
        return OnnxRuntimeBuilder()
    if target == "onnxruntime+openvino":
        return OnnxRuntimeWithOpenVinoBuilder()
    if target == "openvino":
        return OpenVinoBuilder()
    return TensorRT(timing_cache) if target == "tensorrt" else TensorRTRTX(compute_capabilities)
