"""What running a bundle takes of memory, told before anything is loaded. An estimate, in one place.

Weights are counted as backends hold them, states and caches as a request of known pictures fills them. The factors
of processors were measured on x86-64 with bundles of 0.15 to 1.1 billion weights; tests compare the sum with real
peaks. Those of GPUs are assumed: none was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sinkprune.contract.errors import SinkpruneError
from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.precision import DTYPES, WeightsName
from sinkprune.contract.schedule import Schedule

TOLD_BYTES = 1_000_000_000
"""Needs are told from so many bytes on beside libraries: below, nobody waits, and a terminal is for answers."""
_FIXED_BYTES = 100 << 20
"""Python, numpy and an engine library."""
_GPU_FIXED_BYTES = 1 << 30
"""The same with a GPU's context and libraries."""
_SPARE = 1.1
"""What heaps and arenas keep beside what is in use."""


class Copies(NamedTuple):
    """How many times their bytes in files weights are held."""

    held: float
    """While the bundle is loaded."""
    loading: float
    """Beside that, those of the graph that is being loaded."""


@dataclass(frozen=True)
class WeightMemory:
    """How an engine library holds weights, by the form they are stored in."""

    copies: Mapping[WeightsName, Copies]
    maps_engines: bool = False
    """Whether engines are mapped as they lie in their files, so that loading them takes no more."""


_ORT_CPU: dict[WeightsName, Copies] = {
    "fp32": Copies(1.0, 0.1),
    # Computed with in fp32, as everything is there.
    "fp16": Copies(2.0, 0.5),
    "bf16": Copies(2.0, 0.5),
    # A sum and a scale for each 32 inputs beside the codes; while packing, the codes twice.
    "int8": Copies(1.4, 0.9),
    "int4": Copies(1.2, 0.9),
    "uint4": Copies(1.2, 0.9),
}
_OPENVINO: dict[WeightsName, Copies] = {
    # What the file holds, in memory of the process's own, beside what is packed. Measured on one segment; 16 bits: no
    # more than that.
    "fp32": Copies(2.0, 0.3),
    "fp16": Copies(3.0, 0.3),
    "bf16": Copies(3.0, 0.3),
    "int8": Copies(2.2, 0.3),
    "int4": Copies(2.4, 0.3),
    "uint4": Copies(2.4, 0.3),
}
_GPU = Copies(1.0, 1.0)
"""In every form: a GPU holds weights as their file does, which is in memory too while it is loaded. On boards, and
within processors, both are the same memory."""
ORT_CPU, OPENVINO = WeightMemory(_ORT_CPU, maps_engines=True), WeightMemory(_OPENVINO)


class BackendMemory(NamedTuple):
    """How a backend holds weights."""

    decoder: WeightMemory
    vision: WeightMemory | None = None
    """How it holds the vision tower's; None where that is `decoder`."""


class TooLittleMemoryError(SinkpruneError):
    """What was asked for takes more memory than is free."""


@dataclass(frozen=True)
class MemoryNeed:
    """About how many bytes of the machine's memory a bundle takes, by what takes them."""

    weights: int
    """All graphs' weights, as the backend holds them."""
    loading: int
    """What loading the largest graph takes beside them for a moment."""
    cache: int
    """Keys and values of one answer."""
    activations: int
    """What is computed on the way to an answer."""
    fixed: int = _FIXED_BYTES
    """What libraries take, whatever they load."""
    on_gpu: bool = False
    """Whether it is memory that a GPU computes in, and assumed."""

    @property
    def bytes(self) -> int:
        """The most at any moment: activations and caches come when all is loaded."""
        return self.fixed + self.weights + max(self.loading, self.cache + self.activations)

    def check(self, what: str, free: int, way_out: str) -> None:
        """Raise `TooLittleMemoryError` for `what`, if fewer than these bytes are `free`; 0 is not known.

        `way_out` says how to need less, as the last of several ways. Of what is assumed, half of weights and cache is
        sure to be needed: a GPU may hold fp32 in fp16.
        """
        least = (self.weights + self.cache) // 2 if self.on_gpu else self.bytes
        if 0 < free < least:
            raise TooLittleMemoryError(
                f"not enough memory: {what} needs {self.told}, {gigabytes(free)} are free. End other programs, use a "
                f"machine with more, or {way_out}."
            )

    @property
    def told(self) -> str:
        """The need in words: "about 3.1 GB (weights 2.0 GB, ...)"."""
        parts = {"weights": self.weights, "KV cache": self.cache, "activations": self.activations}
        told = ", ".join(f"{name} {gigabytes(count)}" for name, count in parts.items())
        where = " of the GPU's memory" if self.on_gpu else ""
        return f"about {gigabytes(self.bytes)}{where} ({told})"


def gigabytes(count: int) -> str:
    """Return a number of bytes as messages tell it: "3.1 GB", or "12 MB" of less than a tenth of a gigabyte."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.0f} MB"


def running_need(
    manifest: Manifest,
    memory: BackendMemory | None,
    *,
    built: bool,
    layouts: Sequence[VisualLayout],
    rows: Schedule,
    tokens: int,
) -> MemoryNeed:
    """What an answer about pictures of these `layouts` takes of the memory that a backend computes in.

    `memory` is how the backend holds weights (`KNOWN[name].memory`), None on a GPU.
    `built` says whether engines are loaded in the bundle's place: onnxruntime's map what is packed already, and
    openvino's are read and packed as a bundle is. `rows` is what a budget keeps of the pictures; `tokens` is how many
    there are of text, prompt and answer together.
    """
    copies = {graph: _copies(manifest, memory, graph, built) if memory else _GPU for graph in manifest.graphs}
    held = sum(each.held * manifest.weight_bytes(graph) for graph, each in copies.items())
    loading = max(each.loading * manifest.weight_bytes(graph) for graph, each in copies.items())
    cache = cache_bytes(manifest, rows, tokens)
    given = max(rows.per_layer(manifest.language_model.num_layers)) + tokens
    activations = decoder_bytes(manifest, given) + _deepstack_bytes(manifest, layouts, given)
    activations += max((tower_bytes(manifest, one) for one in layouts), default=0)
    return MemoryNeed(
        weights=round(held),
        loading=round(loading),
        cache=round(_SPARE * cache),
        activations=round(_SPARE * activations),
        fixed=_FIXED_BYTES if memory else _GPU_FIXED_BYTES,
        on_gpu=memory is None,
    )


def cache_bytes(manifest: Manifest, rows: Schedule, tokens: int) -> int:
    """Keys and values of the visual `rows` that each layer keeps and of `tokens` of text."""
    lm = manifest.language_model
    lengths = sum(rows.per_layer(lm.num_layers)) + lm.num_layers * tokens
    return lengths * 2 * lm.num_kv_heads * lm.head_dim * DTYPES[manifest.precision].itemsize


def _copies(manifest: Manifest, memory: BackendMemory, graph: str, built: bool) -> Copies:
    """How a backend holds the weights of a graph, or of the engine `built` of it."""
    vision, forms = graph == "vision", manifest.weights
    library = memory.vision or memory.decoder if vision else memory.decoder
    copies = library.copies[forms.vision if vision else forms.decoder]
    return copies._replace(loading=0) if built and library.maps_engines else copies


def memory_line(need: MemoryNeed, free: int) -> str:
    """The line that a command begins with: what it needs, and what is free where the system tells."""
    return f"needs {need.told}" + (f", {gigabytes(free)} are free" if free else "")


def decoder_bytes(manifest: Manifest, rows: int) -> int:
    """One layer's states on `rows` rows in fp32, and its attention: two matrices of all heads."""
    lm = manifest.language_model
    states = 4 * lm.hidden_size + 3 * lm.intermediate_size + 4 * lm.num_heads * lm.head_dim
    return 4 * (rows * states + 2 * lm.num_heads * rows**2)


def _deepstack_bytes(manifest: Manifest, layouts: Sequence[VisualLayout], rows: int) -> int:
    """What the tower gives beside its tokens, and the first layers take beside their `rows`: whole, and split by
    layer."""
    seen = sum(layout.all_tokens for layout in layouts)
    return (seen + 2 * rows) * manifest.deepstack_width * DTYPES[manifest.precision].itemsize


def tower_bytes(manifest: Manifest, layout: VisualLayout) -> int:
    """The same of a block of the vision tower, whose groups are seen at once and apart from each other."""
    tower, rows = manifest.vision, layout.tokens * manifest.vision.patches_per_token
    states = 6 * tower.hidden_size + 3 * tower.intermediate_size
    return 4 * layout.groups * (rows * states + 2 * tower.num_heads * rows**2)
