"""Libraries that build engines, behind one small interface. Adding one is a module here and its name below."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.engines_manifest import Range, Realisation, Target
from sinkprune.contract.errors import UsageError
from sinkprune.contract.manifest import GraphSpec
from sinkprune.engines.preflight import Memory
from sinkprune.engines.progress import BuildProgress

TARGETS: tuple[Target, ...] = ("onnxruntime", "tensorrt", "tensorrt-rtx")


@dataclass(frozen=True)
class Job:
    """One graph to build."""

    graph: str
    model: Path
    spec: GraphSpec
    profiles: dict[str, dict[str, Range]]


@dataclass(frozen=True)
class Built:
    """What became of a graph."""

    profiles: dict[str, dict[str, Range]]
    nodes: dict[str, Realisation]
    """Of each node of domain `sinkprune`."""
    device_memory: int | None


class Builder(Protocol):
    """A library that builds engines, as far as `engines.json` tells of it (`EnginesManifest`)."""

    target: Target
    library_version: str
    compute_capabilities: tuple[int, ...]
    flags: dict[str, str]
    suffix: str
    """Of an engine's file."""

    @property
    def plugins(self) -> dict[str, str]:
        """What the engines built so far call when they run."""
        ...

    def check_bundle(self, bundle: Bundle) -> None:
        """Refuse a bundle this library cannot build; raises `EnginesError`."""
        ...

    def memories(self) -> tuple[Memory, ...]:
        """What a build draws on, and how much of it is free."""
        ...

    def build(self, job: Job, output: Path, progress: BuildProgress) -> Built:
        """Write the engine of one graph to the file `output`; raises `EnginesError`."""
        ...


def new_builder(target: str, compute_capabilities: tuple[int, ...] | None, timing_cache: Path) -> Builder:
    """The builder for `target`; `compute_capabilities`, e.g. 86, are what tensorrt-rtx compiles for.

    `timing_cache` is a file that tensorrt reads and writes. Raises `UsageError` and `BackendError`.
    """
    if target not in TARGETS:
        raise UsageError(f"unknown target '{target}'; known targets: {', '.join(TARGETS)}.")
    if compute_capabilities is not None and target != "tensorrt-rtx":
        where = {"tensorrt": "the GPU of this machine", "onnxruntime": "the processor of this machine"}[target]
        raise UsageError(
            f"--sm is for target tensorrt-rtx, which compiles ahead for other GPUs; target {target} builds for "
            f"{where}. Leave --sm out."
        )
    if target == "onnxruntime":
        from sinkprune.engines.targets.onnxruntime import OnnxRuntimeBuilder

        return OnnxRuntimeBuilder()
    from sinkprune.engines.targets.tensorrt import TensorRTBuilder
    from sinkprune.engines.targets.tensorrt_libraries import TensorRT, TensorRTRTX

    if target == "tensorrt":
        return TensorRTBuilder(TensorRT(timing_cache))
    return TensorRTBuilder(TensorRTRTX(compute_capabilities))
