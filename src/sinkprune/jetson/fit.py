"""Which models, forms and engines fit into a board's memory.

The bounds are a roofline's. A prefill takes at least its FLOPs at the board's dense peak, and at least one read of
the weights. A token takes at least a read of weights and cache.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from PIL import Image

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.bundle import Target
from sinkprune.contract.files.manifest_file import FileSpec
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.memory import MemoryNeed, cache_bytes, running_need
from sinkprune.contract.precision import BLOCK_SIZES, DTYPES, PrecisionName, WeightForms, WeightsName
from sinkprune.contract.schedule import Schedule, VisualLayout, decode_bytes, prefill_flops, schedule
from sinkprune.engines.preflight import COPIES, disk_bytes, weights_bytes
from sinkprune.jetson.boards import Board
from sinkprune.runtime.backends.known import KNOWN
from sinkprune.runtime.families import load_family
from sinkprune.runtime.media.picture_warnings import seen_part, smaller_picture
from sinkprune.runtime.steps.request import DEFAULT_METHOD

_BITS: dict[WeightsName, int] = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8, "int4": 4, "uint4": 4}
_IN_BLOCKS = ("int4", "uint4")


def manifest_in_form(manifest: Manifest, precision: PrecisionName, form: WeightsName) -> Manifest:
    """Return the manifest of an export with `--precision` and `--weights`, without the files' sums.

    As in the export, a tower next to quantised weights is int8, and blocks have 128 weights. All weights of a graph
    count as matrices of linear layers. Others are below 2 % of a tower, and less of a decoder.
    """
    quantised = form in ("int8", *_IN_BLOCKS)
    block = max(BLOCK_SIZES) if form in _IN_BLOCKS else None
    forms = WeightForms(form, "int8" if quantised else form, block)
    files = {
        f"graphs/weights/{graph}.bin": FileSpec(
            round(
                manifest.weight_bytes(graph)
                * _bits(forms, graph, precision)
                / _bits(manifest.weights, graph, manifest.precision)
            ),
            "",
        )
        for graph in manifest.graphs
        if manifest.weight_bytes(graph)
    }
    return replace(manifest, precision=precision, weights=forms, files={**manifest.files, **files})


def _bits(forms: WeightForms, graph: str, precision: PrecisionName) -> float:
    """Return the bits of a weight of `graph`, with its share of a block's scale and zero point."""
    form = forms.vision if graph == "vision" else forms.decoder
    if form not in _IN_BLOCKS:
        return _BITS[form]
    scale = 8 * DTYPES[precision].itemsize + (_BITS[form] if form == "uint4" else 0)
    return _BITS[form] + scale / (forms.block_size or max(BLOCK_SIZES))


@dataclass(frozen=True)
class BuildFit:
    """The needs of building engines, and whether the machine meets them."""

    memory_bytes: int
    """For the largest graph, without activations. Graphs are built one after the other."""
    disk_bytes: int
    """For all engines, next to the bundle."""
    moving_disk_bytes: int
    """For all engines, with `sinkprune-build --move`."""
    fits: bool | None
    """Whether memory and disk suffice, if known; None if both are unknown."""
    needs_move: bool
    """Whether the disk has room only with --move."""


def build_fit(manifest: Manifest, target: Target, usable_bytes: int, disk_free: int | None) -> BuildFit:
    """Return whether these bytes suffice to build engines of `manifest` for `target`; 0 and None are unknown.

    The GPU is a board's, which shares its memory with the CPU.
    """
    copies = COPIES[target]
    memory = max(weights_bytes(manifest, graph, copies.memory + copies.gpu) for graph in manifest.graphs)
    disk, moving = (disk_bytes(manifest, manifest.graphs, target, move=move) for move in (False, True))
    known = [memory <= usable_bytes] if usable_bytes else []
    known += [moving <= disk_free] if disk_free is not None else []
    return BuildFit(
        memory_bytes=memory,
        disk_bytes=disk,
        moving_disk_bytes=moving,
        fits=all(known) if known else None,
        needs_move=disk_free is not None and moving <= disk_free < disk,
    )


PROMPT_TOKENS = 64
NEW_TOKENS = 128
"""Tokens of text in prompt and answer, for needs and bounds, unless engines accept fewer."""
BOARD_BACKEND = "tensorrt"
ModelState = Literal["preset", "bundle", "engines"]
"""The state of a model: not exported, a folder of graphs, or a folder of engines."""
_FORMS: dict[PrecisionName, tuple[WeightsName, ...]] = {
    "fp16": ("fp16", "int8", "int4"),
    "fp32": ("fp32", "int8", "int4"),
}
"""The forms of weights in a report, by the type of states."""


class TextLengths(NamedTuple):
    """The tokens of text of the requests in a report."""

    prompt: int = PROMPT_TOKENS
    new: int = NEW_TOKENS
    most: int | None = None
    """The most tokens of prompt and answer together that engines accept; None without a limit."""


_USUAL_LENGTHS = TextLengths()


@dataclass(frozen=True)
class TargetMachine:
    """The backend and the machine for a model."""

    backend: str
    """`tensorrt` on a board, else a backend that computes in the machine's memory."""
    usable_bytes: int
    """Memory for programs; 0 is unknown."""
    board: Board | None
    """The board for bounds; None without a datasheet."""
    disk_free: int | None = None
    """Free bytes for engines; None is unknown."""
    text: TextLengths = _USUAL_LENGTHS

    @property
    def precision(self) -> PrecisionName:
        """The type of states that suits the backend."""
        return "fp16" if self.backend == BOARD_BACKEND else "fp32"


@dataclass(frozen=True)
class TimeBounds:
    """The least milliseconds by a board's datasheet."""

    encoder_flops_ms: float
    """Vision tower and projector, at the dense fp16 peak."""
    prefill_flops_ms: float
    """The decoder's prefill, at the dense fp16 peak."""
    prefill_weights_ms: float
    """The decoder's prefill, by reading its weights once."""
    token_ms: float
    """A token of the answer, by reading weights and cache."""

    @property
    def prefill_ms(self) -> float:
        """The larger of the two bounds of a prefill."""
        return max(self.prefill_flops_ms, self.prefill_weights_ms)

    @property
    def by_weights(self) -> bool:
        """Whether reading the weights bounds the prefill, not FLOPs."""
        return self.prefill_weights_ms > self.prefill_flops_ms


@dataclass(frozen=True)
class BudgetFit:
    """A form of weights at a budget."""

    memory: MemoryNeed
    memory_bytes: int
    fits: bool | None
    """None if the machine's memory is unknown."""
    kv_bytes: int
    decode_bytes: int
    """Bytes that a token of the answer reads: weights of decoder and head, and the cache of the prompt."""
    bounds: TimeBounds | None
    """Known for TensorRT on a board."""
    longest_text: int | None
    """The most tokens of prompt and answer together that memory, model and engines allow after the picture.

    None if the machine's memory is unknown."""


@dataclass(frozen=True)
class FormFit:
    """A model whose weights are stored in one form."""

    precision: PrecisionName
    weights: str
    """The forms of all graphs, as in `WeightForms.name`."""
    exported: bool
    """Whether the bundle has this form; else sizes are computed, to one per cent."""
    weight_bytes: int
    build: BuildFit | None
    """The needs of a build; None for engines, which are built."""
    budgets: dict[str, BudgetFit]

    @property
    def decoder_form(self) -> str:
        """The form of the decoder's weights."""
        return self.weights.partition(",")[0]


@dataclass(frozen=True)
class BudgetRows:
    """The rows of a picture that a budget keeps, which do not depend on the form of weights."""

    tokens_per_layer: tuple[int, ...]
    """Visual tokens at each decoder layer."""
    prefill_flops: int
    encoder_flops: int
    """Of the vision tower, and of the projector on the rows that reach it."""


@dataclass(frozen=True)
class ModelFit:
    """A model on a machine."""

    name: str
    kind: ModelState
    """For a bundle and for engines, `name` is the folder."""
    source: str
    """The checkpoint or the preset."""
    random_weights: bool
    family: str
    dialect: str
    """The dialect of the bundle, or the one to export a preset in."""
    backend: str
    picture: tuple[int, int]
    """Width and height in pixels."""
    visual_tokens: int
    """Of the picture, unpruned."""
    seen_share: float
    """The share of the picture's area that the model sees, with its own fit."""
    seen_part: str | None
    """A phrase for the part that the model sees; None for the whole picture."""
    seen_size: tuple[int, int] | None
    """The size in pixels to which the picture is scaled; None in families that scale none to a limit."""
    seen_smaller: str | None
    """A phrase for that size, if the model sees the picture clearly smaller than it is."""
    prompt_tokens: int
    new_tokens: int
    method: str
    """The pruning method of the budgets in `rows`; empty for a bundle without any."""
    rows: dict[str, BudgetRows]
    forms: tuple[FormFit, ...]

    @property
    def has_bounds(self) -> bool:
        """Whether bounds are known, which they are for TensorRT on a board."""
        return any(fit.bounds for form in self.forms for fit in form.budgets.values())

    def fitting(self) -> Iterator[tuple[FormFit, str]]:
        """Yield the forms that fit, each with its first budget that fits. An unknown fit counts as a fit."""
        for form in self.forms:
            budget = next((name for name, fit in form.budgets.items() if fit.fits is not False), None)
            if budget is not None:
                yield form, budget


def fit(name: str, kind: ModelState, manifest: Manifest, target: TargetMachine, picture: tuple[int, int]) -> ModelFit:
    """Return how the model of `manifest` fits `target`, for one image with the size `picture` (width, height).

    Raises `BundleError` for a malformed processor in the manifest, and `ImageError` for a size that the model does
    not accept.
    """
    layout = load_family(manifest).layout(Image.new("RGB", picture))
    method = _method(manifest)
    names = [UNPRUNED, *manifest.plans.get(method, {})]
    schedules = {budget: schedule(manifest, method, budget, [layout]) for budget in names}
    rows = {budget: _rows(manifest, planned, layout, target.text) for budget, planned in schedules.items()}
    forms = []
    for stored, exported in _stored(manifest, kind, target):
        budgets = {
            budget: _budget_fit(stored, kind, planned, layout, rows[budget], target)
            for budget, planned in schedules.items()
        }
        count = sum(map(stored.weight_bytes, stored.graphs))
        build = build_fit(stored, KNOWN[target.backend].target, target.usable_bytes, target.disk_free)
        built = None if kind == "engines" else build
        forms.append(FormFit(stored.precision, stored.weights.name, exported, count, built, budgets))
    return ModelFit(
        name=name,
        kind=kind,
        source=manifest.checkpoint.source,
        random_weights=manifest.checkpoint.random_weights,
        family=manifest.family,
        dialect=manifest.dialect,
        backend=target.backend,
        picture=picture,
        visual_tokens=layout.all_tokens,
        seen_share=layout.seen_share,
        seen_part=seen_part(layout) if layout.seen_share < 1 else None,
        seen_size=layout.seen_size,
        seen_smaller=smaller_picture(layout) or None,
        prompt_tokens=target.text.prompt,
        new_tokens=target.text.new,
        method=method,
        rows=rows,
        forms=tuple(forms),
    )


def _method(manifest: Manifest) -> str:
    """Return the method that commands use if they name none, else the first of the bundle."""
    return DEFAULT_METHOD if DEFAULT_METHOD in manifest.plans else next(iter(manifest.plans), "")


def _stored(manifest: Manifest, kind: ModelState, target: TargetMachine) -> Iterator[tuple[Manifest, bool]]:
    """Yield the manifest in every form of the report, and whether it is exported in it.

    The form of a bundle comes first if it is not in `_FORMS`.
    """
    forms = [(target.precision, form) for form in _FORMS[target.precision]]
    own = (manifest.precision, manifest.weights.decoder) if kind != "preset" else None
    if own is not None and own not in forms:
        yield manifest, True
    for precision, form in forms:
        exported = (precision, form) == own
        yield manifest if exported else manifest_in_form(manifest, precision, form), exported


def _rows(manifest: Manifest, planned: Schedule, layout: VisualLayout, text: TextLengths) -> BudgetRows:
    lm = manifest.language_model
    visual = planned.per_layer(lm.num_layers)
    return BudgetRows(
        tokens_per_layer=tuple(visual),
        prefill_flops=prefill_flops(lm, [count + text.prompt for count in visual]),
        encoder_flops=layout.tower_flops + layout.projector_flops * planned.rows,
    )


def _budget_fit(
    stored: Manifest,
    kind: ModelState,
    planned: Schedule,
    layout: VisualLayout,
    rows: BudgetRows,
    target: TargetMachine,
) -> BudgetFit:
    def need(tokens: int) -> MemoryNeed:
        built = kind == "engines"
        memory = KNOWN[target.backend].memory
        return running_need(stored, memory, built=built, layouts=[layout], planned=planned, tokens=tokens)

    lengths = target.text
    here = need(lengths.prompt + lengths.new)
    cache = cache_bytes(stored, planned, lengths.prompt)
    step = decode_bytes(stored, cache)
    bounds = _bounds(target.board, rows, step - cache, step) if target.board else None
    most = max(stored.language_model.max_positions - planned.rows, 0)
    room = range((most if lengths.most is None else min(most, lengths.most)) + 1)
    text = bisect_right(room, target.usable_bytes, key=lambda tokens: need(tokens).bytes) - 1
    return BudgetFit(
        memory=here,
        memory_bytes=here.bytes,
        fits=here.bytes <= target.usable_bytes if target.usable_bytes else None,
        kv_bytes=cache,
        decode_bytes=step,
        bounds=bounds,
        longest_text=max(text, 0) if target.usable_bytes else None,
    )


def _bounds(board: Board, rows: BudgetRows, weights: int, step: int) -> TimeBounds:
    per_ms, bytes_per_ms = board.fp16_tflops * 1e9, board.gb_per_s * 1e6
    return TimeBounds(
        encoder_flops_ms=rows.encoder_flops / per_ms,
        prefill_flops_ms=rows.prefill_flops / per_ms,
        prefill_weights_ms=weights / bytes_per_ms,
        token_ms=step / bytes_per_ms,
    )
