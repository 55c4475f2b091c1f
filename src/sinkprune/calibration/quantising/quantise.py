"""Quantises the weights of a bundle of floats, graph by graph. The new bundle is written whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np

from sinkprune.calibration.evaluation.sample_size import calibration_warnings
from sinkprune.calibration.quantising.chain_run import ChainRun, EncodedPrompt, weight_graphs
from sinkprune.calibration.quantising.cost import CalibrationCost, check_memory, estimate
from sinkprune.calibration.quantising.graphs import WeightGraphs
from sinkprune.calibration.quantising.products import Products
from sinkprune.calibration.quantising.report import LayerReport, QuantisationReport, layer_reports, logit_error
from sinkprune.calibration.quantising.subgraphs import Tensors
from sinkprune.contract.bundle import Bundle
from sinkprune.contract.errors import AccuracyError, NumericsError, UsageError
from sinkprune.contract.files.folders import check_outside, check_replaceable, replacing
from sinkprune.contract.files.manifest_file import file_specs
from sinkprune.contract.files.signature import Sign
from sinkprune.contract.manifest import BUNDLE, FORMAT_VERSION, Manifest
from sinkprune.contract.precision import DTYPES, Array, WeightForms, WeightsName
from sinkprune.contract.reports.progress import OnProgress, unreported
from sinkprune.contract.system.memory_need import decoder_bytes, tower_bytes
from sinkprune.export.precision import PRECISIONS
from sinkprune.export.rewriting import RewrittenGraph
from sinkprune.export.weights.calibrated_rounding import calibrated
from sinkprune.export.weights.rounding import RoundedMatrix, to_nearest
from sinkprune.export.weights.weight_forms import chosen_forms
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.media.picture_warnings import unseen_warnings
from sinkprune.runtime.profiling.profile import model_name

_QUANTISED: tuple[WeightsName, ...] = ("int8", "int4")
_NEAREST = "nearest"
"""The temporary folder of the graphs that are rounded to the nearest."""
_SMALL_FILES_BYTES = 64 << 20
_STATES = 6
"""Hidden states of a row that are kept: before a graph and between its subgraphs, in each chain run."""
_NAMED = 3
"""Layers that an error message names."""


@dataclass(frozen=True)
class ErrorLimits:
    """The largest relative L2 errors with which a bundle is written."""

    logits: float
    layer: float


def quantised_forms(
    manifest: Manifest, weights: WeightsName, vision: WeightsName | None, block_size: int | None
) -> WeightForms:
    """Return the forms of the new weights; raises `UsageError`, also for a bundle that is quantised already."""
    own = manifest.weights
    forms = chosen_forms(PRECISIONS[manifest.precision], weights, vision, block_size)
    if {own.decoder, own.vision} & {*_QUANTISED, "uint4"}:
        raise UsageError(
            f"the bundle's weights are {own.name}, so what they were before is lost. Give the bundle of floats that "
            "sinkprune-export writes without --weights."
        )
    if forms.vision not in (*_QUANTISED, own.vision):
        raise UsageError(
            f"--vision-weights is {forms.vision}, expected int8 or int4, or {own.vision}, which leaves the tower as "
            "it is."
        )
    return forms


def quantise_bundle(
    bundle: Bundle,
    output: Path,
    prompts: Sequence[EncodedPrompt],
    forms: WeightForms,
    limits: ErrorLimits,
    *,
    threads: int,
    force: bool = False,
    sign: Sign | None = None,
    progress: OnProgress = unreported,
    on_cost: Callable[[CalibrationCost], None] = lambda cost: None,
) -> tuple[Manifest, QuantisationReport]:
    """Write `bundle` into the new folder `output` with its matrices in `forms`, rounded for the `prompts`.

    All other files are copied. `on_cost` is called with the estimated cost before the work begins. Raises
    `AccuracyError` if an error exceeds the `limits`, `NumericsError` if the floats' logits are not finite,
    `UsageError` if memory is too small or a matrix does not fit its form, and what `replacing` raises. After an error
    `output` is unchanged.
    """
    check_replaceable(output, BUNDLE, force=force)
    check_outside(output, bundle.path, BUNDLE)
    graphs = WeightGraphs(bundle, forms, threads)
    planned = {
        name: graphs.rewritten(name, to_nearest) for name in weight_graphs(bundle.manifest) if graphs.changes(name)
    }
    cost = _cost(graphs, bundle.manifest, planned, prompts)
    on_cost(cost)
    check_memory(cost)
    needed = _disk_bytes(bundle.manifest, planned)
    with replacing(output, BUNDLE, needed, "choose --weights int4", force=force) as root:
        report = _Quantisation(bundle, graphs, root, cost.weights, progress).run(prompts, forms)
        _check_limits(report, limits)
        for number, (name, file) in enumerate(bundle.files.items()):
            progress("copying", number, len(bundle.files), "files")
            if not (root / name).exists():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                file.copy(root / name)
        manifest = replace(
            bundle.manifest,
            format_version=FORMAT_VERSION,
            sinkprune_version=version("sinkprune"),
            weights=forms,
            files=file_specs(root, progress=progress),
        )
        BUNDLE.write(root, manifest, sign)
    return manifest, report


class _Quantisation:
    """The quantisation of one bundle into the folder `root`."""

    def __init__(self, bundle: Bundle, graphs: WeightGraphs, root: Path, weights: int, progress: OnProgress) -> None:
        self._bundle, self._graphs, self._root = bundle, graphs, root
        self._rounded, self._weights, self._progress = 0, weights, progress
        self._layers: list[LayerReport] = []

    def run(self, prompts: Sequence[EncodedPrompt], forms: WeightForms) -> QuantisationReport:
        """Write every graph that changes, and compare the outputs."""
        manifest = self._bundle.manifest
        floats, ours, nearest = (ChainRun(self._bundle, prompts) for _ in range(3))
        for name in weight_graphs(manifest):
            with Model.of_bundle(self._bundle, name).by_path():
                if self._graphs.changes(name):
                    outputs = self._write(name, floats.feeds)
                    ours.advance(self._graphs.run_written(name, self._root, ours.feeds).outputs())
                    folder = self._root / _NEAREST
                    nearest.advance(self._graphs.run_written(name, folder, nearest.feeds).outputs())
                    shutil.rmtree(folder)
                    floats.advance(outputs)
                else:
                    for run in (floats, ours, nearest):
                        run.advance(self._graphs.run(name, run.feeds).outputs())
        if not np.isfinite(floats.logits).all():
            raise NumericsError(
                "the bundle's own logits on these prompts are not finite, so nothing can be compared with them. "
                "Export it with --precision fp32."
            )
        return QuantisationReport(
            model=model_name(manifest.checkpoint.source),
            precision=manifest.precision,
            weights=forms,
            prompts=len(prompts),
            rows=_rows(prompts),
            layers=tuple(self._layers),
            logits=logit_error(floats.logits, ours.logits),
            to_nearest=logit_error(floats.logits, nearest.logits),
            warnings=(
                *calibration_warnings(len(prompts)),
                *unseen_warnings([prompt.picture.layout.seen_share for prompt in prompts], "prompts"),
            ),
            seen_share=min(prompt.picture.layout.seen_share for prompt in prompts),
        )

    def _write(self, graph: str, feeds: Sequence[Tensors]) -> list[Tensors]:
        """Write a graph with its matrices rounded for its inputs, and a second one rounded to the nearest.

        Returns the outputs of its floats for each prompt.
        """
        samples = [_samples(graph, feed) for feed in feeds]
        every = list(chain.from_iterable(samples))
        products = Products(self._graphs.read(graph), lambda: self._graphs.run(graph, every))

        def rounding(name: str, weight: Array, most: int, block: int, dtype: np.dtype[Any]) -> RoundedMatrix:
            found = calibrated(weight, products(name), most, block, dtype)
            self._layers += layer_reports(graph, products.parts(name), most.bit_length() + 1, found)
            self._rounded += weight.size
            self._progress("rounding", self._rounded / 1e6, self._weights / 1e6, "M weights")
            return found.rounded

        file = self._graphs.file(graph)
        self._graphs.rewritten(graph, to_nearest).save(self._root / _NEAREST, file)
        self._graphs.rewritten(graph, rounding).save(self._root, file)
        # A prompt's last sample is the graph's real input.
        outputs = products.outputs()
        return [outputs[end - 1] for end in accumulate(map(len, samples))]


def _samples(graph: str, feed: Tensors) -> list[Tensors]:
    """Return the inputs that a graph's layers are measured on: for the head, each row of a prompt's text.

    A request runs the head on the last row only, but one row a prompt says little about its many inputs.
    """
    if graph != "head":
        return [feed]
    rows = feed["hidden"]
    return [{"hidden": rows[:, [row]]} for row in range(rows.shape[1])]


def _rows(prompts: Sequence[EncodedPrompt]) -> int:
    """Return the rows of all prompts, of text and pictures."""
    return sum(prompt.picture.layout.all_tokens + sum(map(len, prompt.texts)) for prompt in prompts)


def _cost(
    graphs: WeightGraphs, manifest: Manifest, planned: Iterable[str], prompts: Sequence[EncodedPrompt]
) -> CalibrationCost:
    text = sum(len(prompt.texts[-1]) for prompt in prompts)
    patches = sum(prompt.picture.layout.all_tokens for prompt in prompts) * manifest.vision.patches_per_token
    rows = {"vision": patches, "head": text}
    layers = {name: graphs.layers(name) for name in planned}
    return estimate(layers, {name: rows.get(name, _rows(prompts)) for name in layers}, _states(manifest, prompts))


def _states(manifest: Manifest, prompts: Sequence[EncodedPrompt]) -> int:
    """Return the bytes of all prompts' kept states, each with a mask, and of the longest prompt's computation."""
    lengths, lm = [_rows([prompt]) for prompt in prompts], manifest.language_model
    kept = sum(_STATES * rows * lm.hidden_size + rows**2 for rows in lengths)
    computed = max(
        decoder_bytes(manifest, max(lengths)), *(tower_bytes(manifest, prompt.picture.layout) for prompt in prompts)
    )
    return kept * DTYPES[manifest.precision].itemsize + computed


def _disk_bytes(manifest: Manifest, planned: dict[str, RewrittenGraph]) -> int:
    """Return the bytes of the new bundle, with the largest graph twice while it is compared."""
    kept = sum(spec.size for spec in manifest.files.values()) - sum(map(manifest.weight_bytes, planned))
    written = [graph.bytes for graph in planned.values()]
    return max(kept, 0) + sum(written) + max(written, default=0) + _SMALL_FILES_BYTES


def _check_limits(report: QuantisationReport, limits: ErrorLimits) -> None:
    found, worst = report.logits.relative_l2, report.worst[:_NAMED]
    furthest = worst[0].error.relative_l2
    if found <= limits.logits and furthest <= limits.layer:
        return
    what, error, limit, option = (
        ("the logits", found, limits.logits, "--max-error")
        if found > limits.logits
        else ("a layer's output", furthest, limits.layer, "--max-layer-error")
    )
    named = ", ".join(f"'{layer.matrix}' of {layer.graph} ({layer.error.relative_l2:.3f})" for layer in worst)
    smaller = "a smaller --block-size, " if report.weights.block_size not in (None, 32) else ""
    wider = "--weights int8" if report.weights.decoder == "int4" else "the bundle of floats"
    raise AccuracyError(
        f"{report.weights.name} changes {what} by {error:.3f} of its length, expected at most {limit:g} ({option}). "
        f"Furthest off: {named}. Nothing was written. Try {smaller}{wider}, or a larger --limit."
    )
