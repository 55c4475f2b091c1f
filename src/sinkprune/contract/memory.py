"""The memory that a bundle needs, and the memory that the machine has.

Weights count as backends hold them, and states and caches as a request with known pictures fills them. The factors of
CPUs were measured on x86-64 with bundles of 0.15 to 1.1 billion weights. Tests compare the sum with measured peaks.
The factors of GPUs are assumptions, with which one measured peak agrees (docs/measurements/gpu-h200.md).
"""

from __future__ import annotations

import re
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from sinkprune.contract.budgets import is_tower
from sinkprune.contract.errors import TooLittleMemoryError
from sinkprune.contract.precision import DTYPES, WeightsName

if TYPE_CHECKING:
    from sinkprune.contract.manifest import Manifest
    from sinkprune.contract.schedule import Schedule, VisualLayout

ROOT = Path("/")
# Kernels write a space or a backslash of a path as a backslash and three octal digits.
_ESCAPED = re.compile(r"\\([0-7]{3})")


class ControlGroup(NamedTuple):
    """A control group of this process."""

    folder: Path
    """The folder of the group's files."""
    version: int
    """1 or 2, which determines the names and units of the files."""

    def numbers(self, file: str) -> list[int | None]:
        """Return the whole numbers in a file of the group, None for each "max"; empty without the file."""
        words = " ".join(_lines(self.folder / file)).split()
        return [int(word) if word.isdecimal() else None for word in words]

    def named(self, file: str) -> dict[str, int]:
        """Return the lines "name number" of a file of the group; empty without the file."""
        words = [line.split() for line in _lines(self.folder / file)]
        return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdecimal()}


def control_groups(controller: str, root: Path = ROOT) -> list[ControlGroup]:
    """Return the groups whose `controller` ("cpu" or "memory") limits this process: its own first, then all above.

    A container sees its own group and those below; groups above are hidden from it. Empty where the system has no
    control groups. The system's files are read below `root`.
    """
    found = []
    for version, mounted, mount_point in _mounts(controller, root):
        own = _own_group(controller, version, root)
        if own is None:
            continue
        below = own.relative_to(mounted) if own.is_relative_to(mounted) else PurePosixPath()
        folder = root / mount_point.relative_to("/")
        for part in (below, *below.parents):
            group = ControlGroup(folder / part, version)
            if group not in found:
                found.append(group)
    return found


def _mounts(controller: str, root: Path) -> list[tuple[int, PurePosixPath, PurePosixPath]]:
    """Return the hierarchies that may hold `controller`: version, mounted group, and mount point."""
    mounts = []
    for line in _lines(root / "proc/self/mountinfo"):
        fields, _, rest = line.partition(" - ")
        kind, options = rest.split(" ")[0], rest.split(" ")[-1].split(",")
        if kind == "cgroup2" or (kind == "cgroup" and controller in options):
            places = (_ESCAPED.sub(lambda found: chr(int(found[1], 8)), field) for field in fields.split(" ")[3:5])
            group, point = map(PurePosixPath, places)
            mounts.append((2 if kind == "cgroup2" else 1, group, point))
    return mounts


def _own_group(controller: str, version: int, root: Path) -> PurePosixPath | None:
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if (number == "0" and not controllers) if version == 2 else controller in controllers.split(","):
            return PurePosixPath(path)
    return None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []


def available_bytes(root: Path = ROOT) -> int:
    """Return the bytes of memory that this process can take without swapping; 0 if they are unknown.

    The least of three: the memory that the kernel can make available, the rest of the limit of each control group of
    the process, and the rest of the process's own limit (`ulimit -v`). The system's files are read below `root`.
    """
    lines = _lines(root / "proc/meminfo")
    machine = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    groups = [_of_group(group) for group in control_groups("memory", root)]
    known = [count for count in (*machine, *groups, _of_process()) if count is not None]
    return max(0, min(known, default=0))


def _of_group(group: ControlGroup) -> int | None:
    """Return the bytes left of the limit of `group`, or None without a limit. Cached files count as free."""
    if group.version == 2:
        # Over "high" the kernel takes pages back until the process nearly stands still.
        limits, (current, cached, shared) = ["memory.max", "memory.high"], ("memory.current", "file", "shmem")
    else:
        limits = ["memory.limit_in_bytes"]
        current, cached, shared = "memory.usage_in_bytes", "total_cache", "total_shmem"
    most = [number for file in limits for number in group.numbers(file) if number is not None]
    used = [number for number in group.numbers(current) if number is not None]
    if not most or not used:
        return None
    parts = group.named("memory.stat")
    # Shared memory is counted as cached, and only swapping gives it back.
    return min(most) - used[0] + max(0, parts.get(cached, 0) - parts.get(shared, 0))


def _of_process() -> int | None:
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY:
        return None
    taken = [int(line.split()[0]) * resource.getpagesize() for line in _lines(ROOT / "proc/self/statm")]
    return most - taken[0] if taken else None


LEAST_REPORTED_BYTES = 1_000_000_000
"""Commands report needs of at least so many bytes, without libraries. Smaller ones are not worth a line."""
_FIXED_BYTES = 100 << 20
"""Python, numpy and an engine library."""
_GPU_FIXED_BYTES = 1 << 30
"""The same, with a GPU's context and libraries."""
_SPARE = 1.1
"""The factor for memory that heaps and arenas keep in reserve."""


class WeightCopies(NamedTuple):
    """The memory of weights, as multiples of their bytes in files."""

    held: float
    """While the bundle is loaded."""
    loading: float
    """Additional copies of the graph that is being loaded."""


@dataclass(frozen=True)
class WeightMemory:
    """The memory of weights in an engine library, by their storage form."""

    copies: Mapping[WeightsName, WeightCopies]
    maps_engines: bool = False
    """Whether engines are memory-mapped, so that loading needs no more memory."""


_ORT_CPU: dict[WeightsName, WeightCopies] = {
    "fp32": WeightCopies(1.0, 0.1),
    # The CPU computes in fp32.
    "fp16": WeightCopies(2.0, 0.5),
    "bf16": WeightCopies(2.0, 0.5),
    # Besides the codes, a sum and a scale for each 32 inputs; while packing, the codes twice.
    "int8": WeightCopies(1.4, 0.9),
    "int4": WeightCopies(1.2, 0.9),
    "uint4": WeightCopies(1.2, 0.9),
}
# The file's content in the process's own memory, and the packed weights. Measured on one segment; 16 bits: an upper
# bound.
_HELD: dict[WeightsName, float] = {"fp32": 2.0, "fp16": 3.0, "bf16": 3.0, "int8": 2.2, "int4": 2.4, "uint4": 2.4}
_OPENVINO = {form: WeightCopies(held, 0.3) for form, held in _HELD.items()}
_GPU = WeightCopies(1.0, 1.0)
"""For every form: a GPU holds weights as in their file, which is in memory too during loading. Boards and integrated
GPUs have a single memory for both."""


def in_both(first: WeightMemory, second: WeightMemory) -> WeightMemory:
    """Return the memory of weights that two libraries hold, loaded one after the other."""
    pairs = {form: (own, second.copies[form]) for form, own in first.copies.items()}
    return WeightMemory(
        {form: WeightCopies(a.held + b.held, max(a.loading, b.loading)) for form, (a, b) in pairs.items()}
    )


ORT_CPU, OPENVINO = WeightMemory(_ORT_CPU, maps_engines=True), WeightMemory(_OPENVINO)


class BackendMemory(NamedTuple):
    """The memory of weights in a backend."""

    decoder: WeightMemory
    vision: WeightMemory | None = None
    """The vision tower's; None if it is like `decoder`."""


@dataclass(frozen=True)
class MemoryNeed:
    """The estimated bytes of the machine's memory that a bundle needs, by purpose."""

    weights: int
    """The weights of all graphs, as the backend holds them."""
    loading: int
    """Temporary memory for loading the largest graph."""
    cache: int
    """Keys and values of one answer."""
    activations: int
    """Intermediate results."""
    fixed: int = _FIXED_BYTES
    """The libraries' own memory."""
    on_gpu: bool = False
    """Whether this is a GPU's memory, and an assumption."""

    @property
    def bytes(self) -> int:
        """Return the peak: activations and caches are allocated after loading."""
        return self.fixed + self.weights + max(self.loading, self.cache + self.activations)

    def check(self, what: str, free: int, way_out: str) -> None:
        """Raise `TooLittleMemoryError` for `what` if fewer than these bytes are `free`; 0 means unknown.

        `way_out` completes the message with a way to need less. On a GPU only half of weights and cache is certain,
        because a GPU may hold fp32 in fp16.
        """
        least = (self.weights + self.cache) // 2 if self.on_gpu else self.bytes
        if 0 < free < least:
            raise TooLittleMemoryError(
                f"not enough memory: {what} {memory_line(self, free)}. End other programs, use a machine with more, "
                f"or {way_out}."
            )

    def summary(self, needed: str) -> str:
        """Return the need in words: "about 3.1 GB (weights 2.0 GB, ...)"; `needed` are all its bytes."""
        parts = {"weights": self.weights, "KV cache": self.cache, "activations": self.activations}
        listed = ", ".join(f"{name} {gigabytes(count)}" for name, count in parts.items())
        where = " of the GPU's memory" if self.on_gpu else ""
        return f"about {needed}{where} ({listed})"


def gigabytes(count: int, digits: int = 1) -> str:
    """Return a number of bytes in words: "3.1 GB", or "12 MB" below a tenth of a gigabyte."""
    return f"{count / 1e9:.{digits}f} GB" if count >= 1e8 else f"{count / 1e6:.{digits - 1}f} MB"


def compared_sizes(*counts: int) -> list[str]:
    """Return numbers of bytes in words, with so many digits that different numbers look different."""
    shown = ([gigabytes(count, digits) for count in counts] for digits in range(1, 10))
    return next(words for words in shown if len(set(words)) == len(set(counts)))


def running_need(
    manifest: Manifest,
    memory: BackendMemory | None,
    *,
    built: bool,
    layouts: Sequence[VisualLayout],
    planned: Schedule,
    tokens: int,
) -> MemoryNeed:
    """Return the memory of an answer about pictures of these `layouts`, or of a chunk, on the backend's device.

    `memory` describes the backend (`KNOWN[name].memory`); None for a GPU. With `built`, engines replace the bundle's
    graphs: those of onnxruntime are mapped, and those of openvino are read and packed like a bundle. `planned` is
    what a budget keeps of the pictures. `tokens` counts the text of prompt and answer.
    """
    copies = {graph: _copies(manifest, memory, graph, built) if memory else _GPU for graph in manifest.graphs}
    held = sum(each.held * manifest.weight_bytes(graph) for graph, each in copies.items())
    loading = max(each.loading * manifest.weight_bytes(graph) for graph, each in copies.items())
    cache = cache_bytes(manifest, planned, tokens)
    given = max(planned.per_layer(manifest.language_model.num_layers)) + tokens
    # DeepStack's features are the tower's output, and inputs of the first layers.
    features = sum(layout.all_tokens for layout in layouts) + 2 * given
    activations = decoder_bytes(manifest, given)
    activations += features * manifest.deepstack_width * DTYPES[manifest.precision].itemsize
    towers = [tower_bytes(manifest, one) for one in layouts]
    # A policy's tower runs once, on all cameras.
    activations += sum(towers) if manifest.policy else max(towers, default=0)
    return MemoryNeed(
        weights=round(held),
        loading=round(loading),
        cache=round(_SPARE * cache),
        activations=round(_SPARE * activations),
        fixed=_FIXED_BYTES if memory else _GPU_FIXED_BYTES,
        on_gpu=memory is None,
    )


def cache_bytes(manifest: Manifest, rows: Schedule, tokens: int) -> int:
    """Return the bytes of keys and values of the visual `rows` of each layer and of `tokens` of text."""
    lm = manifest.language_model
    lengths = sum(rows.per_layer(lm.num_layers)) + lm.num_layers * tokens
    return lengths * 2 * lm.num_kv_heads * lm.head_dim * DTYPES[manifest.precision].itemsize


def _copies(manifest: Manifest, memory: BackendMemory, graph: str, built: bool) -> WeightCopies:
    """Return the copies of weights of a graph, or of its engine if it is `built`."""
    vision, forms = is_tower(graph), manifest.weights
    library = memory.vision or memory.decoder if vision else memory.decoder
    copies = library.copies[forms.vision if vision else forms.decoder]
    return copies._replace(loading=0) if built and library.maps_engines else copies


def memory_line(need: MemoryNeed, free: int) -> str:
    """Return the first line of a command: its need, and the free memory if it is known."""
    needed, left = compared_sizes(need.bytes, free)
    return f"needs {need.summary(needed)}" + (f", {left} are free" if free else "")


def decoder_bytes(manifest: Manifest, rows: int) -> int:
    """Return the bytes of one layer's fp32 states on `rows` rows, and of two attention matrices of all heads."""
    lm = manifest.language_model
    states = 4 * lm.hidden_size + 3 * lm.intermediate_size + 4 * lm.num_heads * lm.head_dim
    return 4 * (rows * states + 2 * lm.num_heads * rows**2)


def tower_bytes(manifest: Manifest, layout: VisualLayout) -> int:
    """Return the same for a block of the vision tower, which attends within each group."""
    tower, rows = manifest.vision, layout.tokens * manifest.vision.patches_per_token
    states = 6 * tower.hidden_size + 3 * tower.intermediate_size
    return 4 * layout.groups * (rows * states + 2 * tower.num_heads * rows**2)
