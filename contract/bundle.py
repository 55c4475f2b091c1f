"""The bundle: a folder of graphs, weights and `bundle.json`, their manifest.

This module is the only reader and writer of `bundle.json`. Reading validates everything before anything is loaded:
the format version, every field, and (`verify`) every file's size and sha256.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from sinkprune.contract.budgets import BUDGETS, UNPRUNED, Budget, Counts
from sinkprune.contract.errors import BudgetError, BundleError
from sinkprune.contract.manifest_file import FileSpec, ManifestFile, outside
from sinkprune.contract.precision import DTYPES, PrecisionName

FORMAT_VERSION = 3
MANIFEST = "bundle.json"
EMBEDDING = "weights/embedding.safetensors"
TOKENIZER = "weights/tokenizer.json"
CHAT_TEMPLATE = "weights/chat_template.jinja"

BUNDLE = ManifestFile(
    name=MANIFEST,
    format_version=FORMAT_VERSION,
    folder="bundle",
    a_folder="a bundle",
    error=BundleError,
    make="sinkprune-export CHECKPOINT -o {root}",
    again="Export or copy the bundle again.",
    upgrade="Upgrade sinkprune, or export the checkpoint again with this one.",
)

Dtype = Literal["float32", "float16", "int64", "bool"]
DialectName = Literal["onnx24", "trt10"]


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a graph; a `str` dimension is dynamic."""

    name: str
    dtype: Dtype
    shape: tuple[Any, ...]


@dataclass(frozen=True)
class GraphSpec:
    """One ONNX graph of the bundle: its file (relative to the bundle) and its typed interface."""

    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class PlanSpec:
    """The weightless graphs of one method at one budget, by their name under `graphs`."""

    sanitizer: str | None
    """The graph between `vision` and `projector`; None if every visual token goes to the LLM."""
    select_after: dict[str, str]
    """The graph behind each pruning layer, by the layer's 0-based number."""
    positions: Literal["keep", "compact"]
    """Whether survivors of a stage keep their position ids or are renumbered."""
    counts: Counts | None
    """The token counts its graphs realise on one group of this bundle's visual tokens; None where images differ in
    theirs, and the graphs take the budget's shares of what they are given."""


@dataclass(frozen=True)
class Plan(PlanSpec):
    """A plan on an image or a clip whose number of visual tokens is known."""

    counts: Counts
    groups: int = 1
    """How many groups of `counts` it has."""

    @property
    def kept(self) -> int:
        """The rows that all its groups send to the LLM."""
        return self.groups * self.counts.kept


@dataclass(frozen=True)
class LanguageModel:
    """Facts of the decoder. Sizes are in elements."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rope_theta: float
    rope_sections: tuple[int, ...] = ()
    """How many rotary frequencies turn with each axis of a position (time, height, width) in mRoPE; empty where a
    position is one number."""

    @property
    def decoder_parameters(self) -> int:
        """Weights of all decoder layers, biases aside."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = 2 * q + 2 * kv + 3 * self.intermediate_size + 2
        return self.num_layers * layer * self.hidden_size


@dataclass(frozen=True)
class Tokens:
    """Token ids the runtime must know."""

    image: int
    stop: tuple[int, ...]
    bos: str
    """The text of the first special token, for chat templates that write it; empty if there is none."""
    eos: str


@dataclass(frozen=True)
class Checkpoint:
    """Where the weights came from."""

    source: str
    config_sha256: str
    random_weights: bool


@dataclass(frozen=True)
class Manifest:
    """The content of `bundle.json`."""

    format_version: int
    sinkprune_version: str
    family: str
    precision: PrecisionName
    dialect: DialectName
    checkpoint: Checkpoint
    language_model: LanguageModel
    vision: dict[str, Any]
    """Facts of the vision tower, as the family's own files write and read them."""
    most_visual_tokens: int
    """The most visual tokens a group has; all have as many unless images differ in theirs (`any_resolution`)."""
    max_images: int
    """The most images a prompt may have."""
    projector: str | None
    """The graph from the tower's width to the decoder's; None where the tower ends in the decoder's."""
    processor: dict[str, Any]
    """The image processor's settings, in the checkpoint's own words."""
    tokens: Tokens
    cut_after: tuple[int, ...]
    """The 0-based decoder layers after which the decoder is cut into segments."""
    budgets: dict[str, Budget]
    plans: dict[str, dict[str, PlanSpec]]
    """Plans by method, then budget."""
    graphs: dict[str, GraphSpec]
    files: dict[str, FileSpec]

    @property
    def segments(self) -> tuple[range, ...]:
        """The layers of `decoder_0`, `decoder_1`, ..."""
        return decoder_segments(self.cut_after, self.language_model.num_layers)

    @property
    def any_resolution(self) -> bool:
        """Whether images differ in their number of visual tokens."""
        shapes = [tensor.shape for tensor in self.graphs["vision"].outputs if tensor.name == "norms"]
        return any(isinstance(size, str) for shape in shapes for size in shape[1:])

    def plan(self, method: str, budget: str) -> PlanSpec | None:
        """The plan of `method` at `budget`, None for the unpruned engines; raises `BudgetError`."""
        if method not in self.plans:
            raise BudgetError(
                f"this bundle holds no method '{method}'; it holds: {', '.join(self.plans)}. "
                "Others must be exported first, with sinkprune-export --methods."
            )
        if budget == UNPRUNED:
            return None
        if budget in self.budgets and budget not in self.plans[method]:
            raise BudgetError(
                f"method '{method}' cannot run on as few visual tokens as budget '{budget}' asks for, on this model; "
                f"it can at: {', '.join(self.plans[method])}."
            )
        if budget not in self.plans[method]:
            held = ", ".join([UNPRUNED, *self.plans[method]])
            raise BudgetError(
                f"this bundle holds no budget '{budget}' for method '{method}'; it holds: {held}. "
                "Others must be exported first, with sinkprune-export --budgets."
            )
        return self.plans[method][budget]

    def plan_for(self, method: str, budget: str, tokens: int, groups: int = 1) -> Plan | None:
        """The same for a picture of `groups` groups of `tokens` visual tokens, with the counts it then has."""
        spec = self.plan(method, budget)
        if spec is None:
            return None
        if spec.counts is not None:
            counts = spec.counts.of_groups(groups)
        else:
            if self.budgets[budget].frames == "together":
                tokens, groups = tokens * groups, 1
            counts = self.budgets[budget].resolve(tokens, groups)
        return Plan(spec.sanitizer, spec.select_after, spec.positions, counts, groups)


@dataclass(frozen=True)
class Bundle:
    """A bundle on disk."""

    path: Path
    manifest: Manifest

    def file(self, name: str) -> Path:
        """The path of a file named in the manifest."""
        return self.path / name

    def graph_path(self, graph: str) -> Path:
        """The path of a graph's ONNX file."""
        return self.path / self.manifest.graphs[graph].file


def decoder_segments(cut_after: Sequence[int], num_layers: int) -> tuple[range, ...]:
    """The layers between the cuts behind the layers `cut_after` (0-based, ascending)."""
    starts = [0, *(layer + 1 for layer in cut_after)]
    return tuple(range(start, end) for start, end in zip(starts, [*starts[1:], num_layers], strict=True))


def read_bundle(path: str | os.PathLike[str]) -> Bundle:
    """The bundle at `path`, its manifest validated and every file present at its size; raises `BundleError`."""
    root = Path(path)
    manifest = BUNDLE.read(root, Manifest)
    _check_consistent(root / MANIFEST, manifest)
    BUNDLE.check_sizes(root, manifest.files)
    return Bundle(root, manifest)


def verify(bundle: Bundle, on_bytes: Callable[[int], None] = lambda count: None) -> None:
    """Compare every file with its sha256; `on_bytes` is told of progress. Raises `BundleError`."""
    BUNDLE.check_sums(bundle.path, bundle.manifest.files, on_bytes)


def write_manifest(root: Path, manifest: Manifest) -> None:
    """Write `bundle.json` into the folder `root`."""
    BUNDLE.write(root, manifest)


def _check_consistent(path: Path, manifest: Manifest) -> None:
    """Refuse a manifest whose parts do not fit each other, or whose files lie outside the bundle."""
    if manifest.family not in BUDGETS:
        raise BundleError(
            f"'{path}' is of family '{manifest.family}', expected one of: {', '.join(BUDGETS)}. Upgrade sinkprune."
        )
    decoders = (f"decoder_{segment}" for segment in range(len(manifest.segments)))
    plans = [(name, plan) for budgets in manifest.plans.values() for name, plan in budgets.items()]
    selections = [graph for _, plan in plans for graph in (plan.sanitizer, *plan.select_after.values()) if graph]
    for graph in ("vision", *filter(None, [manifest.projector]), *decoders, "head", *selections):
        if graph not in manifest.graphs:
            raise BundleError(f"'{path}' lacks the graph '{graph}'. Export the bundle again.")
    cuts = {str(layer) for layer in manifest.cut_after}
    for name, plan in plans:
        if plan.counts is None and (name not in manifest.budgets or not manifest.any_resolution):
            raise BundleError(
                f"'{path}' holds a plan at budget '{name}' without counts, and no shares to take instead. "
                "Export the bundle again."
            )
        stages = (plan.counts or manifest.budgets[name]).stages
        if not cuts.issuperset(plan.select_after) or len(plan.select_after) != len(stages):
            raise BundleError(
                f"'{path}' holds a plan that selects after layers {', '.join(plan.select_after)} with "
                f"{len(stages)} counts; the decoder is cut after {', '.join(sorted(cuts, key=int))}. "
                "Export the bundle again."
            )
    for name in [*manifest.files, *(graph.file for graph in manifest.graphs.values())]:
        if outside(name):
            raise BundleError(f"'{path}' names the file '{name}', which lies outside the bundle.")
    needed = [EMBEDDING, TOKENIZER, CHAT_TEMPLATE, *(graph.file for graph in manifest.graphs.values())]
    unlisted = [name for name in needed if name not in manifest.files]
    if unlisted:
        raise BundleError(f"'{path}' has no size and sha256 for '{unlisted[0]}'. Export the bundle again.")
    _check_interfaces(path, manifest)


def _check_interfaces(path: Path, manifest: Manifest) -> None:
    """Refuse graphs that give something else than is needed of them, or take something that nobody gives them."""
    for graph, given, needed in _interfaces(manifest):
        spec = manifest.graphs[graph]
        outputs = {tensor.name: tensor for tensor in spec.outputs}
        # Needed tensors come one by one: an absurd number of layers is refused at its first that is missing.
        for expected in needed:
            _check_tensor(path, graph, "output", outputs.get(expected.name), expected)
        inputs = {tensor.name: tensor for tensor in given}
        for declared in spec.inputs:
            _check_tensor(path, graph, "input", declared, inputs.get(declared.name))


def _check_tensor(path: Path, graph: str, role: str, found: TensorSpec | None, expected: TensorSpec | None) -> None:
    if found and expected and found.dtype == expected.dtype and len(found.shape) == len(expected.shape):
        sizes = zip(found.shape, expected.shape, strict=True)
        if all(wanted is None or size == wanted for size, wanted in sizes):
            return
    told = [f"{spec.name} {spec.dtype}{list(spec.shape)}" if spec else "none" for spec in (found, expected)]
    raise BundleError(
        f"'{path}': graph '{graph}' does not fit the model's facts and cuts: its {role} is {told[0]}, expected "
        f"{told[1]}. Export or copy the bundle again."
    )


_Interface = tuple[str, Iterable[TensorSpec], Iterable[TensorSpec]]


def _interfaces(manifest: Manifest) -> Iterator[_Interface]:
    """Every graph, what it is given and what it must give (docs/graph-contract.md); a size of None is any size.

    What `vision` is given is the family's own: the runtime checks it when it loads the family.
    """
    lm, dtype = manifest.language_model, DTYPES[manifest.precision].name
    vision = {tensor.name: tensor.shape for tensor in manifest.graphs["vision"].outputs}
    tokens, width = vision["tokens"][1:] if len(vision.get("tokens", ())) == 3 else (None, None)

    def floats(name: str, *shape: Any) -> TensorSpec:
        return TensorSpec(name, dtype, shape)  # type: ignore[arg-type]

    def rows(suffix: str = "") -> list[TensorSpec]:
        tables = [floats(f"{table}{suffix}", 1, None, lm.head_dim // 2) for table in ("cos", "sin")]
        return [floats(f"hidden{suffix}", 1, None, lm.hidden_size), *tables]

    def index(*names: str) -> list[TensorSpec]:
        return [TensorSpec(name, "int64", (None,)) for name in names]

    def caches(prefix: str, layers: range) -> Iterator[TensorSpec]:
        for layer in layers:
            yield floats(f"{prefix}key_{layer}", 1, lm.num_kv_heads, None, lm.head_dim)
            yield floats(f"{prefix}value_{layer}", 1, lm.num_kv_heads, None, lm.head_dim)

    # Without a projector the tower's tokens are the decoder's rows.
    features = [floats("tokens", None, tokens, width if manifest.projector else lm.hidden_size)]
    features += [TensorSpec(name, "float32", (None, tokens)) for name in ("norms", "salience")]
    query = floats("query", 1, lm.num_heads, None, lm.head_dim)
    yield "vision", manifest.graphs["vision"].inputs, features
    if manifest.projector:
        embeddings = floats("embeddings", None, None, lm.hidden_size)
        yield manifest.projector, [floats("tokens", None, None, width)], [embeddings]
    for number, layers in enumerate(manifest.segments):
        asked = [query] if layers.stop != lm.num_layers else []
        gives = chain([*rows("_out")[:1], *asked], caches("", layers))
        yield f"decoder_{number}", chain(rows(), caches("past_", layers)), gives
    yield "head", rows()[:1], [floats("logits", 1, lm.vocab_size)]
    for plan in (plan for budgets in manifest.plans.values() for plan in budgets.values()):
        if plan.sanitizer:
            kept = plan.counts.kept if plan.counts else None
            index_of_kept = TensorSpec("kept_index", "int64", (None, kept))
            yield plan.sanitizer, features, [floats("kept_tokens", None, kept, width), index_of_kept]
        key = floats("key", 1, lm.num_kv_heads, None, lm.head_dim)
        selected = [*rows(), query, key, *index("visual_index", "text_index", "visual_group", "quota"), features[1]]
        left = [*rows("_out"), *index("visual_index_out", "text_index_out", "keep_index")]
        for graph in plan.select_after.values():
            yield graph, selected, left
