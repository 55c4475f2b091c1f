"""Checkpoint to bundle, all or nothing: written beside its destination, then renamed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from sinkprune.contract.budgets import Budget
from sinkprune.contract.folders import check_replaceable, replacing
from sinkprune.contract.manifest import (
    BUNDLE,
    CHAT_TEMPLATE,
    EMBEDDING,
    FORMAT_VERSION,
    TOKENIZER,
    GraphSpec,
    Manifest,
    Tokens,
    decoder_segments,
)
from sinkprune.contract.manifest_file import file_specs
from sinkprune.contract.plans import Plan
from sinkprune.export.dialects import DIALECTS, Dialect
from sinkprune.export.graph import WeightedGraph, Weights
from sinkprune.export.planning import Unreachable, parse_budgets, plan_graphs
from sinkprune.export.precision import PRECISIONS, Precision
from sinkprune.export.pruning.plan import PlanFacts, PlanGraphs
from sinkprune.export.source import Request, Source, open_source

# What graphs, tokenizer and manifest take beside the weights, generously.
_SMALL_FILES_BYTES = 64 << 20

Progress = Callable[[str, int], None]
"""Told what is being done and how many weights it advanced by."""


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
    check_replaceable(output, BUNDLE, force=force)
    source = open_source(request)
    with closing(source.weights):
        budgets = parse_budgets(source.family.name, request.budgets)
        facts = _facts(source, precision, dialect, request.max_images)
        planned = plan_graphs(facts, request.methods, budgets, left_out)
        plans_of_all = [plan for plans in planned.values() for plan in plans.values()]
        cut_after = tuple(sorted({layer for plan in plans_of_all for layer in plan.select_after}))
        needed = source.family.parameters * precision.numpy.itemsize + _SMALL_FILES_BYTES
        with replacing(output, BUNDLE, needed, "export with --precision fp16", force=force) as root:
            writer = _Writer(root, source, precision, dialect, progress)
            segments = decoder_segments(cut_after, source.family.language_model.num_layers)
            graphs = writer.weight_graphs(segments)
            plans = writer.plans(planned, budgets, graphs)
            writer.text_files()
            progress("checking sums", 0)
            manifest = Manifest(
                format_version=FORMAT_VERSION,
                sinkprune_version=version("sinkprune"),
                family=source.family.name,
                precision=precision.name,
                dialect=request.dialect,
                checkpoint=source.checkpoint,
                language_model=source.family.language_model,
                vision=source.family.vision,
                most_visual_tokens=facts.most_in_group,
                max_images=request.max_images,
                projector=source.family.projector,
                processor=source.processor,
                tokens=Tokens(source.family.image_token, source.text.stop, source.text.bos, source.text.eos),
                cut_after=cut_after,
                budgets=budgets,
                plans=plans,
                graphs=graphs,
                files=file_specs(root),
            )
            BUNDLE.write(root, manifest)
        return manifest


class _Writer:
    """Writes the parts of a bundle below `root`."""

    def __init__(
        self, root: Path, source: Source, precision: Precision, dialect: Dialect, progress: Progress
    ) -> None:
        self._root, self._source, self._progress = root, source, progress
        self._precision, self._dialect = precision, dialect

    def weight_graphs(self, segments: Sequence[range]) -> dict[str, GraphSpec]:
        """Every graph that holds weights, one after the other."""
        family, specs = self._source.family, {}
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


def _facts(source: Source, precision: Precision, dialect: Dialect, images: int) -> PlanFacts:
    """What methods may know of the model."""
    family, groups = source.family, source.family.groups_of(source.processor)
    return PlanFacts(
        family.language_model,
        family.tokens_of(source.processor),
        family.visual_width,
        precision,
        dialect,
        groups,
        images,
        joined=family.groups_are_frames and groups > 1,
    )
