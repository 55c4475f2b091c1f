"""One builder for each library that builds engines, and the memory and disk that a build needs.

A new library is a module here and a branch of `new_builder`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple, get_args

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.checks import unknown_name
from sinkprune.contract.engines_manifest import ANY_SHAPE, OptimisationProfiles, Realisation, Target
from sinkprune.contract.errors import BackendError, OutOfMemoryError, UsageError
from sinkprune.contract.manifest import BESIDE_GRAPHS, Manifest
from sinkprune.contract.memory import available_bytes, compared_sizes
from sinkprune.engines.progress import BuildProgress
from sinkprune.runtime.backends.models import Model

_ITEM_BYTES = {"float32": 4, "float16": 2, "int64": 8, "bool": 1}
_FIXED_BYTES = 256 << 20
# The size of an engine without its weights, generously. A graph without weights is a few operators: with TensorRT-RTX
# such engines have up to 4 MB. Engines of a CPU hold the graph; OpenVINO's are the largest.
_CODE_BYTES = 16 << 20
_WEIGHTLESS_CODE_BYTES = 5 << 20
_GRAPH_BYTES = 2 << 20


class BuildCopies(NamedTuple):
    """How many copies of a graph's weights a build of its engine holds."""

    memory: float
    """In the machine's memory at the peak, with the engine."""
    gpu: float
    """In a GPU's memory, to time kernels. A board has one memory."""
    disk: float
    """In the files of the engine, at most."""


COPIES: dict[Target, BuildCopies] = {
    # On disk: plain and prepacked weights; prepacked int8 has more scales.
    "onnxruntime": BuildCopies(2.5, 0, 2.5),
    "onnxruntime+openvino": BuildCopies(2.5, 0, 2.5),
    "openvino": BuildCopies(2.5, 0, 1.05),
    # Measured with TensorRT-RTX 1.7. The GPU's share is the least there must be.
    "tensorrt": BuildCopies(2.2, 1, 1.0),
    "tensorrt-rtx": BuildCopies(2.2, 1, 1.0),
}
"""By target. Measured on x86-64 but for the GPU's share."""


@dataclass(frozen=True)
class BuildMemory:
    """A memory that a build uses: the machine's or a GPU's."""

    name: str
    """Its name in messages, as in "12 GB of <name>"."""
    free: int
    """Free bytes."""
    copies: float
    """How many copies of one graph's weights it holds during the build of that graph."""
    activations: bool
    """Whether graphs run in it, to time kernels."""


def system_memory(copies: float, *, activations: bool) -> tuple[BuildMemory, ...]:
    """Return the machine's memory as the only one that a build uses; empty if the free memory is not known.

    `copies` and `activations` are those of `BuildMemory`.
    """
    free = available_bytes()
    return (BuildMemory("memory", free, copies, activations),) if free else ()


def check_memory(
    bundle: Bundle, profiles: Mapping[str, OptimisationProfiles], memories: tuple[BuildMemory, ...]
) -> None:
    """Raise `OutOfMemoryError` if a graph needs more memory than is free, by the estimate of `needed_bytes`.

    `profiles` are the optimisation profiles by graph. Graphs are built one after the other.
    """
    for graph, own in profiles.items():
        if any(needed_bytes(bundle, graph, own, memory) > memory.free for memory in memories):
            raise OutOfMemoryError(
                f"not enough memory: {need_and_free(bundle, graph, own, memories)}. End other programs, build on "
                "a machine with more, or lower --max-prompt and --max-images."
            )


def need_and_free(
    bundle: Bundle, graph: str, profiles: OptimisationProfiles, memories: tuple[BuildMemory, ...]
) -> str:
    """Return the beginning of a sentence: the bytes of each memory that `graph` needs, and those that are free."""
    needs = []
    for memory in memories:
        needed, free = compared_sizes(needed_bytes(bundle, graph, profiles, memory), memory.free)
        needs.append(f"about {needed} of {memory.name}, of which {free} are free")
    return f"building '{graph}' needs {', and '.join(needs)}"


def weights_bytes(manifest: Manifest, graph: str, copies: float) -> int:
    """Return about how many bytes `graph` needs without activations: `copies` of its weights, and a fixed part."""
    return int(copies * manifest.weight_bytes(graph)) + _FIXED_BYTES


def disk_bytes(manifest: Manifest, graphs: Iterable[str], target: Target, *, move: bool) -> int:
    """Return how many bytes of disk building the engines of `graphs` takes at most, the bundle not counted.

    With `move` each graph leaves the bundle when its engine is whole.
    """
    needed = most = sum(manifest.files[name].size for name in BESIDE_GRAPHS if name in manifest.files)
    for graph in graphs:
        weights = manifest.weight_bytes(graph)
        code = _GRAPH_BYTES if target in ANY_SHAPE else _CODE_BYTES if weights else _WEIGHTLESS_CODE_BYTES
        needed += int(COPIES[target].disk * weights) + code
        most = max(most, needed)
        needed -= weights if move else 0
    return most


def needed_bytes(bundle: Bundle, graph: str, profiles: OptimisationProfiles, memory: BuildMemory) -> int:
    """Return about how many bytes of `memory` a build of `graph` needs: weights, activations, and a fixed part."""
    activations = _activation_bytes(bundle, graph, profiles) if memory.activations else 0
    return weights_bytes(bundle.manifest, graph, memory.copies) + activations


def _activation_bytes(bundle: Bundle, graph: str, profiles: OptimisationProfiles) -> int:
    """Return the bytes of the largest inputs and outputs, and of one layer's states in decoder segments.

    Fused attention has no [S,T] matrix, and layers reuse each other's memory.
    """
    spec, lm = bundle.manifest.graphs[graph], bundle.manifest.language_model
    item_bytes = {tensor.name: _ITEM_BYTES[tensor.dtype] for tensor in spec.inputs}
    states = 4 * lm.hidden_size + 3 * lm.intermediate_size + 3 * lm.num_heads * lm.head_dim
    largest = 0
    for ranges in profiles.values():
        # Caches are inputs and outputs.
        needed = 2 * sum(item_bytes[name] * prod(shape.max) for name, shape in ranges.items())
        if graph.startswith("decoder_"):
            needed += ranges["hidden"].max[1] * states * item_bytes["hidden"]
        largest = max(largest, needed)
    return largest


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
    if target.startswith("tensorrt"):
        return TensorRT(timing_cache) if target == "tensorrt" else TensorRTRTX(compute_capabilities)
    known: tuple[type[Builder], ...] = (OnnxRuntimeBuilder, OnnxRuntimeWithOpenVinoBuilder, OpenVinoBuilder)
    return next(each for each in known if each.target == target)()
