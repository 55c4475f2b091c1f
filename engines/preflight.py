"""Whether the memory a build needs is there, before it begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.engines_manifest import OptimisationProfiles
from sinkprune.contract.errors import EnginesError
from sinkprune.contract.manifest import GraphSpec
from sinkprune.contract.system_memory import available_bytes

_ITEM_BYTES = {"float32": 4, "float16": 2, "int64": 8, "bool": 1}
_FIXED_BYTES = 256 << 20


@dataclass(frozen=True)
class Memory:
    """A memory that building engines takes from: the machine's, or a GPU's."""

    name: str
    """What messages call it, as in "12 GB of <name> are needed"."""
    free: int
    """Bytes of it that are free."""
    copies: float
    """How many times the weights of one graph are held in it while that graph is built."""
    activations: bool
    """Whether graphs are run in it, to time kernels."""


def system_memory(copies: float, *, activations: bool) -> tuple[Memory, ...]:
    """The machine's own memory as the only one a build takes from; empty where the system does not tell what is free.

    `copies` and `activations` are those of `Memory`.
    """
    free = available_bytes()
    return (Memory("memory", free, copies, activations),) if free else ()


class OutOfMemoryError(EnginesError):
    """Building an engine takes, or took, more memory than there is."""


def check_memory(bundle: Bundle, profiles: Mapping[str, OptimisationProfiles], memories: tuple[Memory, ...]) -> None:
    """Refuse a build whose largest graph needs more than is free; raises `OutOfMemoryError`, which tells both.

    `profiles` are the optimisation profiles by graph. Graphs are built one after the other, so the largest counts.
    The need is an estimate: see `needed_bytes`.
    """
    for graph, own in profiles.items():
        if any(needed_bytes(bundle, graph, own, memory) > memory.free for memory in memories):
            raise OutOfMemoryError(
                f"not enough memory: {need_and_free(bundle, graph, own, memories)}. End other programs, build on "
                "a machine with more, or lower --max-prompt and --max-images."
            )


def need_and_free(bundle: Bundle, graph: str, profiles: OptimisationProfiles, memories: tuple[Memory, ...]) -> str:
    """What building `graph` needs of each memory and what is free of it, as the beginning of a sentence."""
    told = [
        f"about {needed_bytes(bundle, graph, profiles, memory) / 1e9:.1f} GB of {memory.name}, of which "
        f"{memory.free / 1e9:.1f} GB are free"
        for memory in memories
    ]
    return f"building '{graph}' needs {', and '.join(told)}"


def needed_bytes(bundle: Bundle, graph: str, profiles: OptimisationProfiles, memory: Memory) -> int:
    """About how many bytes of `memory` building `graph` takes: weights a few times, activations, and a fixed part."""
    weights = bundle.manifest.weight_bytes(graph)
    activations = _activation_bytes(bundle, graph, profiles) if memory.activations else 0
    return int(memory.copies * weights) + activations + _FIXED_BYTES


def _activation_bytes(bundle: Bundle, graph: str, profiles: OptimisationProfiles) -> int:
    """Inputs and outputs at their largest, and for decoder segments one layer's states at full length.

    Fused attention keeps no [S,T] matrix, and layers reuse each other's memory.
    """
    spec, lm = bundle.manifest.graphs[graph], bundle.manifest.language_model
    largest = 0
    for ranges in profiles.values():
        inputs = sum(_item_bytes(spec, name) * prod(shape.max) for name, shape in ranges.items())
        # What goes in comes out again: caches, or the new rows of them.
        needed = 2 * inputs
        if graph.startswith("decoder_"):
            rows = ranges["hidden"].max[1]
            states = 4 * lm.hidden_size + 3 * lm.intermediate_size + 3 * lm.num_heads * lm.head_dim
            needed += rows * states * _item_bytes(spec, "hidden")
        largest = max(largest, needed)
    return largest


def _item_bytes(spec: GraphSpec, name: str) -> int:
    return next(_ITEM_BYTES[tensor.dtype] for tensor in spec.inputs if tensor.name == name)
