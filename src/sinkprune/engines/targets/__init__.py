"""One builder for each library that builds engines. A new one is a module here and a branch of `new_builder`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, get_args

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.checks import unknown_name
from sinkprune.contract.engines_manifest import OptimisationProfiles, Realisation, Target
from sinkprune.contract.errors import BackendError, UsageError
from sinkprune.engines.preflight import COPIES, BuildMemory, system_memory
from sinkprune.engines.progress import BuildProgress
from sinkprune.runtime.backends.models import Model

TARGETS: tuple[Target, ...] = get_args(Target)
"""The values of `sinkprune-build --target`."""


@dataclass(frozen=True)
class BuildJob:
    """One graph to build an engine from."""

    model: Model
    """The ONNX file with its weights, and its inputs and outputs."""
    optimisation_profiles: OptimisationProfiles
    """The shapes that the engine must accept."""
    exact_fp32: bool = False
    """Whether products of fp32 must be exact where fp32 is, so that nothing is rounded to TF32."""


class EngineFacts(NamedTuple):
    """The facts of a new engine, for `engines.json`."""

    nodes: dict[str, Realisation]
    """What each node of domain `sinkprune` became, by the node's name."""
    device_memory: int | None = None
    """Bytes of activations that the engine needs to run; None if the library does not report it."""


class Builder:
    """A library that builds engines. `engines.json` records its attributes."""

    target: Target
    library_version: str
    compute_capabilities: tuple[int, ...] = ()
    small_graphs = False
    """Whether backends of this target run graphs that the runtime writes itself, which then have engines too."""
    suffix: str
    """The ending of an engine's file, for example ".engine"."""

    def __init__(self) -> None:
        self.flags: dict[str, str] = {}
        self.plugins: dict[str, str] = {}
        """The plugins that the engines built so far call: sha256 of the kernels by plugin name."""

    def file_name(self, graph: str) -> str:
        """Return the name of the file for the engine of `graph`, for example "vision.engine"."""
        return f"{graph}{self.suffix}"

    def check_bundle(self, bundle: Bundle) -> None:
        """Raise `EnginesError` for a bundle that this version of the library cannot build."""

    def memories(self) -> tuple[BuildMemory, ...]:
        """Return the memories that a build uses, with the free bytes of each."""
        return system_memory(COPIES[self.target].memory, activations=False)

    def build(self, job: BuildJob, output: Path, progress: BuildProgress) -> EngineFacts:
        """Write the engine of one graph to the file `output`, and report the library's phases to `progress`.

        Raises `EnginesError`, and its subclass `OutOfMemoryError` for too little memory.
        """
        raise NotImplementedError


def new_builder(target: str, compute_capabilities: tuple[int, ...] | None, timing_cache: Path) -> Builder:
    """Return the builder for `target`, one of `TARGETS`.

    `compute_capabilities`, e.g. 86 for sm_86, are the GPUs that tensorrt-rtx compiles for; None means this machine's.
    `timing_cache` is a file that tensorrt reads and writes. Raises `UsageError`, and `BackendError` if the library or
    a GPU that it needs is missing.
    """
    if target not in TARGETS:
        raise UsageError(unknown_name(f"unknown target '{target}'", target, TARGETS, "Known targets"))
    if compute_capabilities is not None and target != "tensorrt-rtx":
        where = "the GPU of this machine" if target == "tensorrt" else "the processor of this machine"
        raise UsageError(
            f"--sm is for target tensorrt-rtx, which compiles ahead for other GPUs; target {target} builds for "
            f"{where}. Leave --sm out."
        )
    try:
        from sinkprune.engines.targets.onnxruntime import OnnxRuntimeBuilder, OnnxRuntimeWithOpenVinoBuilder
        from sinkprune.engines.targets.openvino import OpenVinoBuilder
        from sinkprune.engines.targets.tensorrt import TensorRT, TensorRTRTX
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
