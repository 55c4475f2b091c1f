"""Checkpoint to bundle, all or nothing: written beside its destination, then renamed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from sinkprune.contract.budgets import UNPRUNED, Budget
from sinkprune.contract.bundle import write_manifest
from sinkprune.contract.errors import BudgetError, CheckpointError, UsageError
from sinkprune.contract.families import FAMILIES, parse_budget
from sinkprune.contract.folders import check_replaceable, install, staging
from sinkprune.contract.manifest import (
    BUNDLE,
    CHAT_TEMPLATE,
    EMBEDDING,
    FORMAT_VERSION,
    TOKENIZER,
    Checkpoint,
    DialectName,
    GraphSpec,
    Manifest,
    Tokens,
    decoder_segments,
)
from sinkprune.contract.manifest_file import file_specs
from sinkprune.contract.plans import Plan
from sinkprune.export.checkpoint import RandomWeights, SafetensorsWeights, config_sha256, locate, read_json
from sinkprune.export.dialects import DIALECTS, Dialect
from sinkprune.export.families import Family, SalienceBlock, read_family
from sinkprune.export.graph import WeightedGraph, Weights
from sinkprune.export.methods import load_method
from sinkprune.export.precision import PRECISIONS, Precision
from sinkprune.export.presets import PRESETS
from sinkprune.export.pruning.equal_mean import UnreachableMean
from sinkprune.export.pruning.plan import Method, PlanFacts, PlanGraphs, UpTo
from sinkprune.export.text import Text, read_text, small_text

# What graphs, tokenizer and manifest take beside the weights, generously.
_SMALL_FILES_BYTES = 64 << 20

Progress = Callable[[str, int], None]
"""Told what is being done and how many weights it advanced by."""


@dataclass(frozen=True)
class Unreachable:
    """A plan that was left out: the method cannot run on as few visual tokens as the budget asks for."""

    method: str
    budget: str
    why: str


@dataclass(frozen=True)
class Request:
    """What to export."""

    source: str
    """A local folder, a hub name, or with `random_weights` a config.json, a folder holding one, or a preset."""
    budgets: tuple[str, ...] | None = None
    """Budget names; None is every budget of the family."""
    methods: tuple[str, ...] = ("sinkpruner",)
    precision: str = "fp32"
    dialect: DialectName = "opset23"
    random_weights: bool = False
    min_pixels: int | None = None
    """Images are enlarged to at least as many; None is what the checkpoint says."""
    max_pixels: int | None = None
    """Images are scaled down to at most as many; None is what the checkpoint says."""
    salience: SalienceBlock | None = None
    """The vision block whose attention is the salience, for families that have a choice; None is their own."""
    max_images: int = 1
    """The most images a prompt may have."""
    max_frames: int = 0
    """The most frames that are taken of a clip; 0 where there is no video."""


@dataclass(frozen=True)
class _Source:
    """A checkpoint, opened and checked."""

    family: Family
    weights: SafetensorsWeights | RandomWeights
    text: Text
    processor: dict[str, Any]
    checkpoint: Checkpoint


def export_bundle(
    request: Request,
    output: Path,
    *,
    force: bool = False,
    progress: Progress = lambda what, weights: None,
    left_out: Callable[[Unreachable], None] = lambda plan: None,
) -> Manifest:
    """Export `request` into the new folder `output`; with `force` an existing bundle there is replaced.

    `left_out` is told of each budget that a method cannot reach, unless it reaches none: that is a `BudgetError`.
    Everything that can be wrong with the request is found before anything is written; whatever goes wrong later,
    `output` is left as it was.
    """
    precision, dialect = PRECISIONS[request.precision], DIALECTS[request.dialect]
    if request.max_images < 1:
        raise UsageError(f"--max-images is {request.max_images}, expected at least 1.")
    if request.max_frames < 0:
        raise UsageError(f"--max-frames is {request.max_frames}, expected 0 for no video, or how many.")
    check_replaceable(output, BUNDLE, force=force)
    source = _open_source(request)
    try:
        budgets = _budgets(source.family.name, request.budgets)
        methods = {name: load_method(name) for name in request.methods}
        planned = _plan_graphs(source, precision, dialect, request.max_images, methods, budgets, left_out)
        plans_of_all = [plan for plans in planned.values() for plan in plans.values()]
        cut_after = tuple(sorted({layer for plan in plans_of_all for layer in plan.select_after}))
        needed = source.family.parameters * precision.numpy.itemsize + _SMALL_FILES_BYTES
        with staging(output, BUNDLE, needed, "export with --precision fp16") as root:
            writer = _Writer(root, source, precision, dialect, progress)
            segments = decoder_segments(cut_after, source.family.language_model.num_layers)
            graphs = writer.weight_graphs(segments)
            plans = writer.plans(planned, budgets, graphs)
            writer.text_files()
            progress("checking sums", 0)
            files = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
            manifest = Manifest(
                format_version=FORMAT_VERSION,
                sinkprune_version=version("sinkprune"),
                family=source.family.name,
                precision=precision.name,
                dialect=request.dialect,
                checkpoint=source.checkpoint,
                language_model=source.family.language_model,
                vision=source.family.vision,
                most_visual_tokens=_most(source.family.tokens_of(source.processor)),
                max_images=request.max_images,
                projector=source.family.projector,
                processor=source.processor,
                tokens=Tokens(source.family.image_token, source.text.stop, source.text.bos, source.text.eos),
                cut_after=cut_after,
                budgets=budgets,
                plans=plans,
                graphs=graphs,
                files=file_specs(root, files),
            )
            write_manifest(root, manifest)
            # Hours may have passed: what came to stand there meanwhile is not ours to replace.
            check_replaceable(output, BUNDLE, force=force)
            install(root, output)
        return manifest
    finally:
        source.weights.close()


class _Writer:
    """Writes the parts of a bundle below `root`."""

    def __init__(
        self, root: Path, source: _Source, precision: Precision, dialect: Dialect, progress: Progress
    ) -> None:
        self._root, self._source, self._progress = root, source, progress
        self._precision, self._dialect = precision, dialect

    def weight_graphs(self, segments: Sequence[range]) -> dict[str, GraphSpec]:
        """Every graph that holds weights, one after the other."""
        family = self._source.family
        specs = {}
        for name in family.graphs(segments):
            weights = _Reported(self._source.weights, name, self._progress)
            graph = WeightedGraph(name, self._precision, self._dialect, weights)
            family.build(name, graph, segments, weights)
            specs[name] = graph.save(self._root, f"graphs/{name}.onnx")
        return specs

    def plans(
        self,
        planned: Mapping[str, Mapping[str, PlanGraphs]],
        budgets: Mapping[str, Budget],
        graphs: dict[str, GraphSpec],
    ) -> dict[str, dict[str, Plan]]:
        """The weightless graphs of every method and budget; their interfaces are added to `graphs`."""
        plans: dict[str, dict[str, Plan]] = {}
        for method, by_budget in planned.items():
            plans[method] = {}
            for name, built in by_budget.items():
                folder = f"{method}/{name}"
                for graph in filter(None, [built.sanitizer, *built.select_after.values()]):
                    graphs[f"{folder}/{graph.name}"] = graph.save(self._root, f"graphs/{folder}/{graph.name}.onnx")
                sanitizer = f"{folder}/{built.sanitizer.name}" if built.sanitizer else None
                selects = {str(layer): f"{folder}/{graph.name}" for layer, graph in built.select_after.items()}
                plans[method][name] = Plan(sanitizer, selects, budgets[name].positions, built.counts)
        return plans

    def text_files(self) -> None:
        """Embedding table, tokenizer and chat template."""
        family, text = self._source.family, self._source.text
        (self._root / EMBEDDING).parent.mkdir()
        lm = family.language_model
        weights = _Reported(self._source.weights, "embedding", self._progress)
        table = weights.tensor(family.embedding, [lm.vocab_size, lm.hidden_size])
        rows = {name: weights.tensor(stored, [lm.hidden_size]) for name, stored in family.extra_rows.items()}
        arrays = {"weight": table, **rows}
        contiguous = {name: np.ascontiguousarray(array, self._precision.numpy) for name, array in arrays.items()}
        save_file(contiguous, self._root / EMBEDDING)
        # safetensors writes through a private temporary file
        (self._root / EMBEDDING).chmod(0o644)
        (self._root / TOKENIZER).write_text(text.tokenizer_json, encoding="utf-8")
        (self._root / CHAT_TEMPLATE).write_text(text.chat_template, encoding="utf-8")


class _Reported:
    """Weights that tell `progress` of every tensor read."""

    def __init__(self, weights: Weights, what: str, progress: Progress) -> None:
        self._weights, self._what, self._progress = weights, what, progress

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def tensor(self, name: str, shape: Sequence[int]) -> np.ndarray[Any, Any]:
        array = self._weights.tensor(name, shape)
        self._progress(self._what, array.size)
        return array


def _open_source(request: Request) -> _Source:
    if request.random_weights:
        config = _random_config(request.source)
        family = read_family(request.source, config, request.salience)
        text = small_text(family.language_model.vocab_size, family.special_tokens, family.chat_template)
        checkpoint = Checkpoint(request.source, config_sha256(config), random_weights=True)
        return _Source(family, RandomWeights(), text, _processor(family, {}, request), checkpoint)
    if request.source in PRESETS:
        raise CheckpointError(
            f"'{request.source}' is a preset: true shapes without weights. Add --random-weights, or give a "
            "checkpoint folder or hub name."
        )
    folder = locate(request.source)
    config = read_json(folder / "config.json")
    family = read_family(request.source, config, request.salience)
    nested = folder / "processor_config.json"
    single = folder / "preprocessor_config.json"
    settings = read_json(single if single.exists() or not nested.exists() else nested)
    video = folder / "video_preprocessor_config.json"
    settings |= {"video_processor": read_json(video)} if video.exists() else {}
    processor = _processor(family, settings, request)
    text = read_text(folder, family.image_token, family.chat_template)
    checkpoint = Checkpoint(request.source, config_sha256(config), random_weights=False)
    return _Source(family, SafetensorsWeights(folder), text, processor, checkpoint)


def _processor(family: Family, settings: Mapping[str, Any], request: Request) -> dict[str, Any]:
    """The image processor's settings, with the pixel counts that were asked for."""
    asked = {"min_pixels": request.min_pixels, "max_pixels": request.max_pixels}
    asked = {name: count for name, count in asked.items() if count is not None}
    frames = {"max_frames": request.max_frames} if request.max_frames else {}
    processor = family.processor({**settings, **asked, **frames})
    if frames and "video" not in processor:
        raise UsageError(f"family '{family.name}' takes no video: leave out --max-frames.")
    if not asked.keys() <= processor.keys():
        raise UsageError(
            f"family '{family.name}' resizes every image to one size: leave out --min-pixels and --max-pixels."
        )
    return processor


def _random_config(source: str) -> dict[str, Any]:
    if source in PRESETS:
        return PRESETS[source]
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"'{source}' is no config.json, no folder holding one and no preset; presets: {', '.join(PRESETS)}."
        )
    return read_json(path)


def _budgets(family: str, names: Sequence[str] | None) -> dict[str, Budget]:
    names = tuple(FAMILIES[family].budgets) if names is None else names
    if UNPRUNED in names:
        raise BudgetError(f"'{UNPRUNED}' needs no export: every bundle runs unpruned. Leave it out of --budgets.")
    return {name: parse_budget(family, name) for name in names}


def _plan_graphs(
    source: _Source,
    precision: Precision,
    dialect: Dialect,
    images: int,
    methods: Mapping[str, Method],
    budgets: Mapping[str, Budget],
    left_out: Callable[[Unreachable], None],
) -> dict[str, dict[str, PlanGraphs]]:
    """The plans by method, then budget, each method with at least one; raises `BudgetError`."""
    family, tokens = source.family, source.family.tokens_of(source.processor)
    model, width, groups = family.language_model, family.visual_width, family.groups_of(source.processor)
    joined = family.groups_are_frames and groups > 1
    if not joined and any(budget.frames == "apart" for budget in budgets.values()):
        raise BudgetError(
            "option 'per-frame' is for clips of more than one group of frames. Leave it out, or export a family that "
            "takes video with a larger --max-frames."
        )
    facts = PlanFacts(model, tokens, width, precision, dialect, groups, images, joined)
    planned: dict[str, dict[str, PlanGraphs]] = {method: {} for method in methods}
    unreachable: list[Unreachable] = []
    for (method, build), (name, budget) in product(methods.items(), budgets.items()):
        try:
            planned[method][name] = build(facts, budget)
        except UnreachableMean as error:
            unreachable.append(Unreachable(method, name, str(error)))
    for missed in unreachable:
        if not planned[missed.method]:
            raise BudgetError(
                f"method '{missed.method}' reaches none of the budgets {', '.join(budgets)}. At '{missed.budget}': "
                f"{missed.why}. Choose larger budgets, or leave the method out of --methods."
            )
    for missed in unreachable:
        left_out(missed)
    return planned


def _most(tokens: int | UpTo) -> int:
    return tokens.most if isinstance(tokens, UpTo) else tokens
