"""Which models, forms and engines fit into a board's memory, and which of them to run.

The bounds are a roofline's. A prefill takes at least its FLOPs at the board's dense peak, and at least one read of
the weights. A token takes at least a read of weights and cache. So of two forms at one budget, the one that reads
fewer bytes a token has the lower bounds of all times: a prefill has the same FLOPs in both. A policy's chunk has a
prefill, the prefix, and denoising steps in place of tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from PIL import Image

from sinkprune.contract.budgets import FAMILIES, UNPRUNED
from sinkprune.contract.engines_manifest import Target
from sinkprune.contract.files.manifest_file import FileSpec
from sinkprune.contract.flops import decode_bytes, policy_flops, prefill_flops
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.memory import MemoryNeed, cache_bytes, gigabytes, running_need
from sinkprune.contract.policy_facts import MODULATION
from sinkprune.contract.precision import BLOCK_SIZES, DTYPES, PrecisionName, WeightForms, WeightsName
from sinkprune.contract.schedule import Schedule, VisualLayout, schedule
from sinkprune.engines.targets import COPIES, disk_bytes, weights_bytes
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
    files = dict(manifest.files)
    for graph in filter(manifest.weight_bytes, manifest.graphs):
        share = _bits(forms, graph, precision) / _bits(manifest.weights, graph, manifest.precision)
        files[f"graphs/weights/{graph}.bin"] = FileSpec(round(manifest.weight_bytes(graph) * share), "")
    return replace(manifest, precision=precision, weights=forms, files=files)


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
    needs_move = disk_free is not None and moving <= disk_free < disk
    return BuildFit(memory, disk, moving, all(known) if known else None, needs_move)


PROMPT_TOKENS = 64
NEW_TOKENS = 128
"""Tokens of text in prompt and answer, for needs and bounds, unless engines accept fewer."""
_INSTRUCTION_TOKENS, _INSTRUCTION_AND_STATE_TOKENS = 20, 160
"""The same of a policy's prompt, as in docs/policies.md: without and with the state."""
_FEWER_STEPS = (5, 2)
"""Numbers of denoising steps in a report, besides the checkpoint's own."""
BOARD_BACKEND = "tensorrt"
ModelState = Literal["preset", "bundle", "engines"]
"""The state of a model: not exported, a folder of graphs, or a folder of engines."""
_FORMS: dict[PrecisionName, tuple[WeightsName, ...]] = {
    "fp16": ("fp16", "int8", "int4"),
    "fp32": ("fp32", "int8", "int4"),
}
"""The forms of weights in a report, by the type of states."""


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
    most_prompt: int | None = None
    most_new: int | None = None
    """The most tokens of a prompt and of an answer that engines accept; None without a limit."""

    @property
    def precision(self) -> PrecisionName:
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
        return max(self.prefill_flops_ms, self.prefill_weights_ms)

    @property
    def by_weights(self) -> bool:
        """Whether reading the weights bounds the prefill, not FLOPs."""
        return self.prefill_weights_ms > self.prefill_flops_ms


@dataclass(frozen=True)
class ChunkBounds:
    """What a policy's chunk takes at least, at a number of denoising steps: bounds, not forecasts."""

    flops: int
    """Of the tower on all cameras, the projector, the prefix and all denoising steps."""
    bytes: int
    """Read: the weights of tower, projector and decoder once, and those of the expert and the cache in each step."""
    flops_ms: float | None
    """The least milliseconds by FLOPs, at the board's dense fp16 peak; None without a datasheet."""
    bytes_ms: float | None
    """The least milliseconds by bytes, at the board's peak bandwidth; None without a datasheet."""


@dataclass(frozen=True)
class BudgetFit:
    """A form of weights at a budget."""

    memory: MemoryNeed
    memory_bytes: int
    fits: bool | None
    """None if the machine's memory is unknown."""
    kv_bytes: int
    decode_bytes: int
    """Bytes that a token of the answer reads: weights of decoder and head, and the cache of the prompt. Of a policy:
    bytes that a denoising step reads, weights of the expert and the cache."""
    bounds: TimeBounds | None
    """Known for TensorRT on a board; None for a policy."""
    longest_text: int | None
    """The most tokens of prompt and answer together that memory, model and engines allow after the picture.

    None if the machine's memory is unknown, and for a policy."""
    chunks: dict[str, ChunkBounds]
    """The bounds of a policy's chunk, by the number of denoising steps; empty for a model that answers."""


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
        return self.weights.partition(",")[0]


@dataclass(frozen=True)
class BudgetRows:
    """The rows of a picture that a budget keeps, which do not depend on the form of weights."""

    tokens_per_layer: tuple[int, ...]
    """Visual tokens at each decoder layer."""
    prefill_flops: int
    """Of a policy: those of the prefix."""
    encoder_flops: int
    """Of the vision tower, and of the projector on the rows that reach it."""
    step_flops: int | None
    """Of one denoising step of a policy; None for a model that answers."""


@dataclass(frozen=True)
class PolicyInputs:
    """What a policy acts on, and what it returns."""

    cameras: int
    state: tuple[float, ...]
    """A state in the middle of the training data, in the robot's units."""
    actions: int
    """The actions of a chunk."""
    steps: int
    """The checkpoint's number of denoising steps."""


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
    """Of the picture, or of a policy's cameras together, unpruned."""
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
    policy: PolicyInputs | None
    """None for a model that answers."""
    has_bounds: bool
    """Whether bounds of times are known, which they are for TensorRT on a board."""

    def fitting(self) -> Iterator[tuple[FormFit, str]]:
        """Yield the forms that fit, each with its first budget that fits. An unknown fit counts as a fit."""
        for form in self.forms:
            budget = next((name for name, fit in form.budgets.items() if fit.fits is not False), None)
            if budget is not None:
                yield form, budget


def fit(name: str, kind: ModelState, manifest: Manifest, target: TargetMachine, picture: tuple[int, int]) -> ModelFit:
    """Return how the model of `manifest` fits `target`, for one image with the size `picture` (width, height).

    A policy has such a frame of each camera.

    Raises `BundleError` for a malformed processor in the manifest, and `ImageError` for a size that the model does
    not accept.
    """
    layout = load_family(manifest).layout(Image.new("RGB", picture))
    # The method of commands that name none, else the first of the bundle.
    method = DEFAULT_METHOD if DEFAULT_METHOD in manifest.plans else next(iter(manifest.plans), "")
    names = [UNPRUNED, *manifest.plans.get(method, {})]
    policy = manifest.policy
    layouts = [layout] * (manifest.max_images if policy else 1)
    schedules = {budget: schedule(manifest, method, budget, layouts) for budget in names}
    lm, rows, (prompt, new) = manifest.language_model, dict[str, BudgetRows](), _text(manifest, target)
    for budget, planned in schedules.items():
        visual = planned.per_layer(lm.num_layers)
        lengths = [count + prompt for count in visual]
        prefill, step = policy_flops(manifest, lengths) if policy else (prefill_flops(lm, lengths), None)
        encoder = len(layouts) * layout.tower_flops + layout.projector_flops * planned.rows
        rows[budget] = BudgetRows(tuple(visual), prefill, encoder, step)
    forms = []
    for stored, exported in _stored(manifest, kind, target):
        budgets = {
            budget: _budget_fit(stored, kind, planned, layouts, rows[budget], target)
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
        visual_tokens=len(layouts) * layout.all_tokens,
        seen_share=layout.seen_share,
        seen_part=seen_part(layout) if layout.seen_share < 1 else None,
        seen_size=layout.seen_size,
        seen_smaller=smaller_picture(layout) or None,
        prompt_tokens=prompt,
        new_tokens=new,
        method=method,
        rows=rows,
        forms=tuple(forms),
        policy=PolicyInputs(len(layouts), policy.usual_state, policy.chunk, policy.steps) if policy else None,
        has_bounds=target.board is not None,
    )


def _text(manifest: Manifest, target: TargetMachine) -> tuple[int, int]:
    """Return the tokens of text in prompt and answer, for needs and bounds."""
    prompt, new = PROMPT_TOKENS, NEW_TOKENS
    if manifest.policy:
        prompt = _INSTRUCTION_AND_STATE_TOKENS if manifest.policy.state_in_prompt else _INSTRUCTION_TOKENS
        prompt, new = min(prompt, manifest.policy.most_prompt_tokens or prompt) + manifest.policy.own_rows, 0
    return min(prompt, target.most_prompt or prompt), min(new, target.most_new or new)


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


def _budget_fit(
    stored: Manifest,
    kind: ModelState,
    planned: Schedule,
    layouts: Sequence[VisualLayout],
    rows: BudgetRows,
    target: TargetMachine,
) -> BudgetFit:
    prompt, new = _text(stored, target)

    def need(tokens: int) -> MemoryNeed:
        built, memory = kind == "engines", KNOWN[target.backend].memory
        return running_need(stored, memory, built=built, layouts=layouts, planned=planned, tokens=tokens)

    here = need(prompt + new)
    cache = cache_bytes(stored, planned, prompt)
    step = decode_bytes(stored, cache)
    if stored.policy and not stored.decodes:
        step = stored.weight_bytes(stored.last_graph) + cache * stored.reads_caches
    elif stored.policy:
        step *= stored.policy.new_tokens - 1
    bounds = longest = None
    if target.board and not stored.policy:
        per_ms, bytes_per_ms = target.board.fp16_tflops * 1e9, target.board.gb_per_s * 1e6
        flops = (rows.encoder_flops / per_ms, rows.prefill_flops / per_ms)
        bounds = TimeBounds(*flops, (step - cache) / bytes_per_ms, step / bytes_per_ms)
    if target.usable_bytes and not stored.policy:
        most = max(stored.language_model.max_positions - planned.rows, 0)
        if target.most_prompt and target.most_new:
            most = min(most, target.most_prompt + target.most_new)
        room = range(most + 1)
        longest = max(bisect_right(room, target.usable_bytes, key=lambda tokens: need(tokens).bytes) - 1, 0)
    return BudgetFit(
        memory=here,
        memory_bytes=here.bytes,
        fits=here.bytes <= target.usable_bytes if target.usable_bytes else None,
        kv_bytes=cache,
        decode_bytes=step,
        bounds=bounds,
        longest_text=longest,
        chunks=_chunks(stored, rows, step, target.board),
    )


def _chunks(stored: Manifest, rows: BudgetRows, step_bytes: int, board: Board | None) -> dict[str, ChunkBounds]:
    """Return the bounds of a policy's chunk by the number of denoising steps; empty for a model that answers."""
    found: dict[str, ChunkBounds] = {}
    most = stored.policy.steps if stored.policy else 0
    # What depends on the time alone runs once for each time.
    once = sum(map(stored.weight_bytes, stored.graphs.keys() - {stored.last_graph, MODULATION}))
    for steps in (steps for steps in dict.fromkeys((most, *_FEWER_STEPS)) if 0 < steps <= most):
        flops = rows.encoder_flops + rows.prefill_flops + steps * (rows.step_flops or 0)
        read = once + steps * step_bytes
        times = (flops / (board.fp16_tflops * 1e9), read / (board.gb_per_s * 1e6)) if board else (None, None)
        found[str(steps)] = ChunkBounds(flops, read, *times)
    return found


@dataclass(frozen=True)
class Recommendation:
    """How to run a model, and why."""

    model: str
    weights: str
    """The form of the decoder's weights."""
    precision: PrecisionName
    """The type of states."""
    as_it_is: bool
    """Whether the folder can run unchanged; else the model must first be exported in this form."""
    budget: str
    backend: str
    why: str
    """The reason, as a sentence."""
    faster: str | None
    """The weights that would read fewer bytes a token than those of the folder, as a sentence; None if none would."""


def usable_forms(model: ModelFit) -> Iterator[FormFit]:
    """Yield the forms of weights that fit, that the backend supports, and that can be built if necessary."""
    for form, _ in model.fitting():
        builds = model.backend != BOARD_BACKEND or form.build is None or form.build.fits is not False
        if builds and not refused_by_backend(model, form):
            yield form


def refused_by_backend(model: ModelFit, form: FormFit) -> bool:
    """Return whether the backend does not support this form: TensorRT needs fp16 states and no uint4."""
    built = model.kind == "engines" and form.exported
    return model.backend == BOARD_BACKEND and not built and (form.precision != "fp16" or "uint4" in form.weights)


def best_form(model: ModelFit) -> tuple[FormFit, str] | None:
    """Return the form to export that reads the fewest bytes a token, and its budget; None if no form can run.

    The budget comes first: the largest pruned one that an export makes and that fits in any form, because it is the
    most accurate. Then comes the form that reads the fewest bytes of those that fit at this budget, whether the
    folder has it or not.
    """
    forms = list(usable_forms(model))
    # Without budgets with options, as in retain-64+tower.
    made = (UNPRUNED, *FAMILIES[model.family].budgets)
    names = [name for name in _pruned_first(model) if name in made]
    budget = next((name for name in names if any(_fits(form, name) for form in forms)), None)
    if budget is None:
        return None
    return _fewest_bytes((form for form in forms if _fits(form, budget)), budget), budget


def recommend(model: ModelFit, *, as_it_is: bool) -> Recommendation | None:
    """Return the folder unchanged if it can run, and else the best choice; None if there is none.

    `as_it_is` is False if a finding forbids the folder unchanged.
    """
    own = next((form for form in usable_forms(model) if form.exported and as_it_is), None)
    best = best_form(model) if own is None else (own, next(name for name in _pruned_first(model) if _fits(own, name)))
    if best is None:
        return None
    form, budget = best
    compared = [name for name in usable_forms(model) if _fits(name, budget)]
    size, least = gigabytes(form.budgets[budget].decode_bytes), _fewest_bytes(compared, budget)
    why, faster, each = f"Only {form.decoder_form} fits.", None, "denoising step" if model.policy else "token"
    if own is not None:
        runs = "sinkprune-act" if model.policy else "sinkprune-run"
        why = f"'{model.name}' fits as it is. {runs} compares the sums of its files."
        if least is not form and model.kind != "engines":
            new, weights = gigabytes(least.budgets[budget].decode_bytes), least.decoder_form
            faster = f"Weights in {weights} would read {new} a {each}, these {size}: export with --weights {weights}."
    elif len(compared) > 1:
        others = " and ".join(other.decoder_form for other in compared if other is not form)
        why = f"It reads the fewest bytes a {each}, {size}; {others} would fit too."
    fixed = (model.name, form.decoder_form, form.precision, own is not None, budget, model.backend)
    return Recommendation(*fixed, why=why, faster=faster)


def _pruned_first(model: ModelFit) -> list[str]:
    """Return the pruned budgets, largest first, and unpruned last. Those with options may be larger than others."""
    pruned = [name for name in model.rows if name != UNPRUNED]
    return [*sorted(pruned, key=lambda name: -sum(model.rows[name].tokens_per_layer)), UNPRUNED]


def _fits(form: FormFit, budget: str) -> bool:
    return form.budgets[budget].fits is not False


def _fewest_bytes(forms: Iterable[FormFit], budget: str) -> FormFit:
    return min(forms, key=lambda form: form.budgets[budget].decode_bytes)
