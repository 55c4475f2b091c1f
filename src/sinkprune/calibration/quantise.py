"""Quantises a bundle's weights by calibration, and reports the error."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sinkprune.calibration.evaluation.statistics import calibration_warnings
from sinkprune.calibration.rounding import CalibratedMatrix, calibrated
from sinkprune.calibration.weight_graphs import (
    ChainRun,
    EncodedPrompt,
    Layer,
    Products,
    Tensors,
    WeightGraphs,
    weight_graphs,
)
from sinkprune.contract.budgets import OTHER_TOWERS
from sinkprune.contract.bundle import Bundle
from sinkprune.contract.errors import AccuracyError, NumericsError, TooLittleMemoryError, UsageError
from sinkprune.contract.files.folders import replacing
from sinkprune.contract.files.manifest_file import file_specs
from sinkprune.contract.files.trust import Sign
from sinkprune.contract.manifest import BUNDLE, FORMAT_VERSION, Manifest
from sinkprune.contract.memory import available_bytes, compared_sizes, decoder_bytes, tower_bytes
from sinkprune.contract.precision import DTYPES, Array, WeightForms, WeightsName
from sinkprune.contract.progress import OnProgress, unreported
from sinkprune.export.weights import PRECISIONS, chosen_forms
from sinkprune.export.weights.rounding import RoundedMatrix, to_nearest
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.media.picture_warnings import unseen_warnings
from sinkprune.runtime.profiling.profile import model_name

_RUNS, _FLOAT = 3, 4
"""Runs of a prompt through a graph (floats, and both roundings); bytes of an fp32."""
_FIXED_BYTES = 600 << 20
"""Python, its libraries, and freed memory that they retain."""
_PACKED = 2
"""Copies of a float in the engine: as read, and packed."""
_ROUNDING_PRODUCTS, _ROUNDING_OUTPUTS, _ROUNDING_BYTES = 12, 10 * 2048, 28
"""Rounding a matrix takes the time of 12 products of its errors with X^T X, these floats for each input, and these
bytes for each value of X^T X while it is inverted."""
_SAMPLE, _TRIES = 1024, 8


class CalibrationCost(NamedTuple):
    bytes: int
    seconds: float
    weights: int
    """How many weights are rounded."""


def estimate(
    graphs: Mapping[str, Sequence[Sequence[Layer]]], rows: Mapping[str, int], states: int
) -> CalibrationCost:
    """Estimate the cost of rounding the layers of `graphs`; the layers of one subgraph are in memory together.

    `rows` is the number of each graph's input rows. `states` is the bytes of the states between subgraphs and within
    them. The time is for this machine, by a short benchmark of matrix products.
    """
    most, operations, rounded = 0.0, 0.0, 0
    for name, subgraphs in graphs.items():
        for layers in subgraphs:
            weights = sum(layer.inputs * layer.outputs for layer in layers)
            rounded += weights
            squares = {layer.value: layer.inputs**2 for layer in layers}
            widest = max((layer.inputs for layer in layers), default=0)
            running = _PACKED * _FLOAT * weights
            rounding = _ROUNDING_BYTES * widest**2 + _FLOAT * _ROUNDING_OUTPUTS * widest
            most = max(most, _FLOAT * sum(squares.values()) + max(running, rounding))
            operations += 2.0 * (_RUNS * weights + sum(squares.values())) * rows[name]
            operations += 2.0 * _ROUNDING_PRODUCTS * sum(layer.inputs**2 * layer.outputs for layer in layers)
    return CalibrationCost(round(most) + states + _FIXED_BYTES, operations / _operations_a_second(), rounded)


def _operations_a_second() -> float:
    sample, seconds = np.ones((_SAMPLE, _SAMPLE), np.float32), []
    for _ in range(_TRIES):
        start = time.perf_counter()
        sample @ sample
        seconds.append(time.perf_counter() - start)
    return 2.0 * _SAMPLE**3 / min(seconds)


@dataclass(frozen=True)
class LayerReport:
    """The quantised weights of one linear layer."""

    graph: str
    matrix: str
    """Its name; layers that share a matrix in the graph have a report each, with their own matrix's name."""
    inputs: int
    outputs: int
    bits: int
    error: float
    """The length of its output's error over that of the output, without a bias and over all rows of the prompts."""
    to_nearest: float
    """The same if every weight had been rounded to the nearest."""


@dataclass(frozen=True)
class LogitError:
    """The error of the first new token's logits, over all prompts."""

    relative_l2: float
    """The length of the error over that of the logits."""
    kl: float
    """Kullback-Leibler divergence from the float weights' probabilities, in nats; the mean."""
    top_1: float
    """The share of prompts whose most likely token is the same."""


@dataclass(frozen=True)
class QuantisationReport:
    """A bundle's quantised weights compared with its floats, on the prompts that they were rounded for."""

    model: str
    precision: str
    weights: WeightForms
    prompts: int
    rows: int
    """Input rows of the decoder, of text and pictures."""
    layers: tuple[LayerReport, ...]
    """In the order in which they run."""
    logits: LogitError
    to_nearest: LogitError
    """If every weight had been rounded to the nearest."""
    warnings: tuple[str, ...]
    """Sentences: why the figures say little, for example too few prompts."""
    seen_share: float = 1.0
    """The share of its area that the model sees of the picture that it sees least of."""

    @property
    def worst(self) -> list[LayerReport]:
        """All layers, those with the largest errors first."""
        return sorted(self.layers, key=lambda layer: -layer.error)


def layer_reports(graph: str, parts: Mapping[str, int], bits: int, found: CalibratedMatrix) -> list[LayerReport]:
    """Return the reports of layers that share a matrix; `parts` are their matrices and outputs, in order."""
    reports, start, inputs = [], 0, found.rounded.codes.shape[1]
    for matrix, outputs in parts.items():
        rows = slice(start, start + outputs)
        length, *errors = (
            float(sums[rows].sum(dtype=np.float64)) for sums in (found.squares, found.errors, found.nearest_errors)
        )
        error, to_nearest = ((square / length) ** 0.5 if length > 0 else 0.0 for square in errors)
        reports.append(LayerReport(graph, matrix, inputs, outputs, bits, error, to_nearest))
        start += outputs
    return reports


def logit_error(exact: Sequence[Array], found: Sequence[Array]) -> LogitError:
    """Return the error of the `found` logits [vocab] of each prompt against the `exact` ones."""
    p, q = np.array(exact, np.float64), np.array(found, np.float64)
    shifted = (logits - logits.max(axis=-1, keepdims=True) for logits in (p, q))
    log_p, log_q = (logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True)) for logits in shifted)
    return LogitError(
        relative_l2=float(np.linalg.norm(q - p) / np.linalg.norm(p)),
        kl=float((np.exp(log_p) * (log_p - log_q)).sum(axis=-1).mean()),
        top_1=float((p.argmax(axis=-1) == q.argmax(axis=-1)).mean()),
    )


_QUANTISED: tuple[WeightsName, ...] = ("int8", "int4")
_NEAREST = "nearest"
"""The temporary folder of the graphs that are rounded to the nearest."""
_SMALL_FILES_BYTES = 64 << 20
_STATES = 6
"""Hidden states of a row that are kept: before a graph and between its subgraphs, in each chain run."""
_NAMED = 3
"""Layers that an error message names."""


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
    others = [graph for graph in OTHER_TOWERS.values() if graph in manifest.graphs]
    if forms.vision != own.vision and others:
        raise UsageError(
            f"the tower's weights would become {forms.vision}, and the graph '{others[0]}' reads the same. Leave the "
            f"tower as it is with --vision-weights {own.vision}, or export the bundle without options 'tower' and "
            "'bars'."
        )
    return forms


def quantise_bundle(
    bundle: Bundle,
    output: Path,
    prompts: Sequence[EncodedPrompt],
    forms: WeightForms,
    max_error: float,
    max_layer_error: float,
    *,
    threads: int,
    force: bool = False,
    sign: Sign | None = None,
    progress: OnProgress = unreported,
    on_cost: Callable[[CalibrationCost], None] = lambda cost: None,
) -> tuple[Manifest, QuantisationReport]:
    """Write `bundle` into the new folder `output` with its matrices in `forms`, rounded for the `prompts`.

    All other files are copied. `on_cost` is called with the estimated cost before the work begins. Raises
    `AccuracyError` if the relative L2 error of the logits exceeds `max_error`, or that of a layer `max_layer_error`;
    `NumericsError` if the floats' logits are not finite, `UsageError` if memory is too small or a matrix does not fit
    its form, and what `replacing` raises. After an error `output` is unchanged.
    """
    graphs = WeightGraphs(bundle, forms, threads)
    planned = {
        name: graphs.rewritten(name, to_nearest) for name in weight_graphs(bundle.manifest) if graphs.changes(name)
    }
    cost = _cost(graphs, bundle.manifest, planned, prompts)
    on_cost(cost)
    free = available_bytes()
    if 0 < free < cost.bytes:
        wanted, left = compared_sizes(cost.bytes, free)
        raise TooLittleMemoryError(
            f"not enough memory: calibrating needs about {wanted}, {left} are free. End "
            "other programs, take a smaller --limit, or use a larger machine: the bundle can run on this one."
        )
    kept = sum(spec.size for spec in bundle.manifest.files.values()) - sum(map(bundle.manifest.weight_bytes, planned))
    written = [graph.bytes for graph in planned.values()]
    # The largest graph is there twice while it is compared.
    needed = max(kept, 0) + sum(written) + max(written, default=0) + _SMALL_FILES_BYTES
    way_out = "take a smaller model" if forms.decoder == "int4" else "choose --weights int4"
    with replacing(output, BUNDLE, needed, way_out, force=force) as root:
        report = _Quantisation(bundle, graphs, root, cost.weights, progress).run(prompts, forms)
        _check_limits(report, max_error, max_layer_error)
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
    def __init__(self, bundle: Bundle, graphs: WeightGraphs, root: Path, weights: int, progress: OnProgress) -> None:
        self._bundle, self._graphs, self._root = bundle, graphs, root
        self._rounded, self._weights, self._progress = 0, weights, progress
        self._layers: list[LayerReport] = []

    def run(self, prompts: Sequence[EncodedPrompt], forms: WeightForms) -> QuantisationReport:
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
                *unseen_warnings([prompt.layout.seen_share for prompt in prompts], "prompts"),
            ),
            seen_share=min(prompt.layout.seen_share for prompt in prompts),
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
    return sum(prompt.layout.all_tokens + sum(map(len, prompt.texts)) for prompt in prompts)


def _cost(
    graphs: WeightGraphs, manifest: Manifest, planned: Iterable[str], prompts: Sequence[EncodedPrompt]
) -> CalibrationCost:
    layouts, lm = [prompt.layout for prompt in prompts], manifest.language_model
    rows = {
        "vision": sum(layout.all_tokens for layout in layouts) * manifest.vision.patches_per_token,
        "head": sum(len(prompt.texts[-1]) for prompt in prompts),
    }
    layers, lengths = {name: graphs.layers(name) for name in planned}, [_rows([prompt]) for prompt in prompts]
    # The kept states of all prompts, each with a mask, and the computation of the longest prompt.
    kept = sum(_STATES * length * lm.hidden_size + length**2 for length in lengths)
    computed = max(decoder_bytes(manifest, max(lengths)), *(tower_bytes(manifest, layout) for layout in layouts))
    states = kept * DTYPES[manifest.precision].itemsize + computed
    return estimate(layers, {name: rows.get(name, sum(lengths)) for name in layers}, states)


def _check_limits(report: QuantisationReport, max_error: float, max_layer_error: float) -> None:
    found, worst = report.logits.relative_l2, report.worst[:_NAMED]
    furthest = worst[0].error
    if found <= max_error and furthest <= max_layer_error:
        return
    what, error, limit, option = (
        ("the logits", found, max_error, "--max-error")
        if found > max_error
        else ("a layer's output", furthest, max_layer_error, "--max-layer-error")
    )
    named = ", ".join(f"'{layer.matrix}' of {layer.graph} ({layer.error:.3f})" for layer in worst)
    smaller = "a smaller --block-size, " if report.weights.block_size not in (None, 32) else ""
    wider = "--weights int8" if report.weights.decoder == "int4" else "the bundle of floats"
    raise AccuracyError(
        f"{report.weights.name} changes {what} by {error:.3f} of its length, expected at most {limit:g} ({option}). "
        f"Furthest off: {named}. Nothing was written. Try {smaller}{wider}, or a larger --limit."
    )
