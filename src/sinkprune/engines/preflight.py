"""Estimates the memory and disk that a build needs, and checks the free memory before the build begins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.engines_manifest import ANY_SHAPE, OptimisationProfiles, Target
from sinkprune.contract.errors import OutOfMemoryError
from sinkprune.contract.manifest import BESIDE_GRAPHS, Manifest
from sinkprune.contract.memory import available_bytes, compared_sizes

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
    largest = 0
    for ranges in profiles.values():
        inputs = sum(item_bytes[name] * prod(shape.max) for name, shape in ranges.items())
        # Caches are inputs and outputs.
        needed = 2 * inputs
        if graph.startswith("decoder_"):
            rows = ranges["hidden"].max[1]
            states = 4 * lm.hidden_size + 3 * lm.intermediate_size + 3 * lm.num_heads * lm.head_dim
            needed += rows * states * item_bytes["hidden"]
        largest = max(largest, needed)
    return largest
