"""Which forms of weights and budgets of a model fit a machine, and how fast they could be there.

The bounds are the roofline's: no prefill takes less than its FLOPs at the board's dense peak or than reading the
weights once, no token less than reading weights and cache. What really runs is slower: `times.py` has a range.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from PIL import Image

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.flops import decode_bytes, prefill_flops
from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.precision import PrecisionName, WeightsName
from sinkprune.contract.schedule import Schedule, schedule
from sinkprune.contract.system.memory_need import MemoryNeed, cache_bytes, running_need
from sinkprune.jetson.boards import Board
from sinkprune.jetson.build_fit import BuildFit, build_fit
from sinkprune.jetson.other_forms import stored_as
from sinkprune.jetson.times import Bounds, Times, expected_times
from sinkprune.runtime.backends.known import KNOWN
from sinkprune.runtime.families import load_family

PROMPT_TOKENS = 64
NEW_TOKENS = 128
"""What is asked and answered, in tokens of text, where needs and bounds are told."""
TYPICAL_NEW_TOKENS = 32
"""The answer of a typical request, in tokens. A recommendation is for one picture, `PROMPT_TOKENS` and this."""
BOARD_BACKEND = "tensorrt"
Kind = Literal["preset", "bundle", "engines"]
"""What a model is there as: nothing yet, a folder of graphs, a folder of engines."""
_FORMS: dict[PrecisionName, tuple[WeightsName, ...]] = {
    "fp16": ("fp16", "int8", "int4"),
    "fp32": ("fp32", "int8", "int4"),
}
"""The forms of weights that are told, by the type of states."""


@dataclass(frozen=True)
class Target:
    """What a model is to run on."""

    backend: str
    """The library that is to run it; `tensorrt` on a board, else one that computes in the machine's memory."""
    usable_bytes: int
    """What a program may take of the memory; 0 is not known."""
    board: Board | None
    """What the bounds are of; None where no datasheet is known."""
    disk_free: int | None = None
    """Bytes that are free where engines are to be written; None is not known."""
    most_text: int | None = None
    """The most tokens of prompt and answer together that engines accept; None where they have no limit."""

    @property
    def precision(self) -> PrecisionName:
        """The type of states that the backend is for."""
        return "fp16" if self.backend == BOARD_BACKEND else "fp32"


@dataclass(frozen=True)
class BudgetFit:
    """A form of weights at a budget."""

    memory: MemoryNeed
    memory_bytes: int
    fits: bool | None
    """None where the machine's memory is not known."""
    kv_bytes: int
    decode_bytes: int
    """What a token of the answer reads: weights of decoder and head, and the cache of the prompt."""
    bounds: Bounds | None
    times: Times | None
    """Of a request with `TYPICAL_NEW_TOKENS`, from the bounds; None where they are."""
    longest_text: int | None
    """The most tokens of prompt and answer together that memory, model and engines allow after the picture.

    None where the machine's memory is not known."""
    longest_context: int | None
    """The same with the picture's tokens into the LLM; 0 where no text fits."""


@dataclass(frozen=True)
class FormFit:
    """A model whose weights are stored in one form."""

    precision: PrecisionName
    weights: str
    """The forms, in a word."""
    exported: bool
    """Whether the bundle has it so; else sizes are computed, to one per cent."""
    weight_bytes: int
    build: BuildFit | None
    """What building engines takes; None of engines, which are built."""
    budgets: dict[str, BudgetFit]

    @property
    def decoder_form(self) -> str:
        """The form of the decoder's weights."""
        return self.weights.partition(",")[0]


@dataclass(frozen=True)
class Rows:
    """What a budget leaves of a picture, in whatever form the weights are."""

    tokens_per_layer: tuple[int, ...]
    """Visual tokens that each decoder layer runs on."""
    prefill_flops: int
    encoder_flops: int
    """Of the vision tower, and of the projector on what it is given."""


@dataclass(frozen=True)
class ModelFit:
    """A model on a machine."""

    name: str
    kind: Kind
    """Of a bundle and of engines `name` is the folder."""
    source: str
    """The checkpoint it is of, or the preset."""
    random_weights: bool
    family: str
    dialect: str
    """Of the bundle, or the one that a preset is to be exported in."""
    backend: str
    picture: tuple[int, int]
    """Width and height in pixels."""
    visual_tokens: int
    """The picture's, unpruned."""
    prompt_tokens: int
    new_tokens: int
    rows: dict[str, Rows]
    forms: tuple[FormFit, ...]

    def fitting(self) -> Iterator[tuple[FormFit, str]]:
        """The forms that fit with a budget, each with its first that does; those whose fit is not known too."""
        for form in self.forms:
            budget = next((name for name, fit in form.budgets.items() if fit.fits is not False), None)
            if budget is not None:
                yield form, budget


def fit(name: str, kind: Kind, manifest: Manifest, target: Target, picture: tuple[int, int]) -> ModelFit:
    """How the model of `manifest` fits `target`, asked about one image of `picture` (width, height).

    Raises `BundleError` for a manifest whose image side is malformed, and `ImageError` for an image of that size that
    the model takes none of.
    """
    layout = load_family(manifest).layout(Image.new("RGB", picture))
    method = next(iter(manifest.plans), "")
    names = [UNPRUNED, *manifest.plans.get(method, {})]
    schedules = {budget: schedule(manifest, method, budget, [layout]) for budget in names}
    rows = {budget: _rows(manifest, planned, layout) for budget, planned in schedules.items()}
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
        prompt_tokens=PROMPT_TOKENS,
        new_tokens=NEW_TOKENS,
        rows=rows,
        forms=tuple(forms),
    )


def _stored(manifest: Manifest, kind: Kind, target: Target) -> Iterator[tuple[Manifest, bool]]:
    """The manifest in every form that is told, and whether it is so already; the bundle's own first where it is none
    of them."""
    own = (manifest.precision, manifest.weights.decoder)
    told = [(target.precision, form) for form in _FORMS[target.precision]]
    there = kind != "preset"
    if there and own not in told:
        yield manifest, True
    for precision, form in told:
        if there and (precision, form) == own:
            yield manifest, True
        else:
            yield stored_as(manifest, precision, form), False


def _rows(manifest: Manifest, planned: Schedule, layout: VisualLayout) -> Rows:
    lm = manifest.language_model
    visual = planned.per_layer(lm.num_layers)
    return Rows(
        tokens_per_layer=tuple(visual),
        prefill_flops=prefill_flops(lm, [count + PROMPT_TOKENS for count in visual]),
        encoder_flops=layout.tower_flops + layout.projector_flops * planned.rows,
    )


def _budget_fit(
    stored: Manifest, kind: Kind, planned: Schedule, layout: VisualLayout, rows: Rows, target: Target
) -> BudgetFit:
    def need(tokens: int) -> MemoryNeed:
        built = kind == "engines"
        memory = KNOWN[target.backend].memory
        return running_need(stored, memory, built=built, layouts=[layout], rows=planned, tokens=tokens)

    here = need(PROMPT_TOKENS + NEW_TOKENS)
    cache = cache_bytes(stored, planned, PROMPT_TOKENS)
    step = decode_bytes(stored, cache)
    bounds = _bounds(target.board, rows, step - cache, step) if target.board else None
    most = max(stored.language_model.max_positions - planned.rows, 0)
    room = range((most if target.most_text is None else min(most, target.most_text)) + 1)
    text = bisect_right(room, target.usable_bytes, key=lambda tokens: need(tokens).bytes) - 1
    return BudgetFit(
        memory=here,
        memory_bytes=here.bytes,
        fits=here.bytes <= target.usable_bytes if target.usable_bytes else None,
        kv_bytes=cache,
        decode_bytes=step,
        bounds=bounds,
        times=expected_times(bounds, stored.weights.decoder, TYPICAL_NEW_TOKENS) if bounds else None,
        longest_text=max(text, 0) if target.usable_bytes else None,
        longest_context=planned.rows * (text >= 0) + max(text, 0) if target.usable_bytes else None,
    )


def _bounds(board: Board, rows: Rows, weights: int, step: int) -> Bounds:
    per_ms, bytes_per_ms = board.fp16_tflops * 1e9, board.gb_per_s * 1e6
    return Bounds(
        encoder_flops_ms=rows.encoder_flops / per_ms,
        prefill_flops_ms=rows.prefill_flops / per_ms,
        prefill_weights_ms=weights / bytes_per_ms,
        token_ms=step / bytes_per_ms,
    )
