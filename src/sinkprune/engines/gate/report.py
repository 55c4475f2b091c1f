"""What the gate reports, and its limits.

Each limit but one is at least three times the largest difference of correct engines of small models: the median row
in int8 is at 2.4 times, where a larger limit would hide faults. docs/gate.md has the figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Literal, NamedTuple, get_args

import numpy as np
from rich.table import Table

from sinkprune.contract.budgets import is_tower
from sinkprune.contract.checks import escaped
from sinkprune.contract.command_line.table_console import TableConsole, make_table
from sinkprune.contract.engines_manifest import EnginesManifest
from sinkprune.contract.manifest import Manifest, TensorSpec
from sinkprune.contract.precision import Array, WeightForms, WeightsName
from sinkprune.contract.report import CaptureReport
from sinkprune.runtime.backends.known import TOWER_IN

Rounding = Literal["fp32", "fp16", "bf16", "int8"]
"""The coarsest type that an engine rounds to. `int8`: activations that meet quantised weights."""
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
"""From the finest to the coarsest."""
_INTEGERS: tuple[WeightsName, ...] = ("int8", "int4", "uint4")


class Limit(NamedTuple):
    """The largest allowed relative difference of the rows of an output: of the median row, and of the worst."""

    typical: float
    worst: float


OutputKind = Literal["rows", "values", "logits", "actions", "indices"]
"""How an output is compared: as rows of states, one value a token (norms, salience), logits, a policy's actions, or
indices."""

_LIMITS: dict[Rounding, dict[OutputKind, tuple[float, float]]] = {
    "fp32": dict.fromkeys(("rows", "values", "logits", "actions"), (1e-4, 1e-3)),
    "fp16": {"rows": (0.005, 0.03), "values": (0.01, 0.06), "logits": (0.003, 0.02), "actions": (0.004, 0.04)},
    "bf16": {"rows": (0.04, 0.25), "values": (0.1, 0.5), "logits": (0.01, 0.06), "actions": (0.08, 0.6)},
    "int8": {"rows": (0.06, 0.4), "values": (0.2, 1.5), "logits": (0.02, 0.12), "actions": (0.1, 0.7)},
}
GAPS: dict[Rounding, float] = {"fp32": 1e-3, "fp16": 0.1, "bf16": 0.3, "int8": 0.5}
"""How much less likely the engines' token may be than the graphs', where two texts part, in standard deviations of
the graphs' logits there. There is no limit where other tokens were kept, by another order of rounded norms."""
CHUNKS: dict[Rounding, float] = {"fp32": 1e-3, "fp16": 0.12, "bf16": 1.2, "int8": 1.6}
"""How much a number of the engines' chunk may differ from the graphs', after all denoising steps, in standard
deviations of the training data's actions."""
TIE = 1e-5
"""A choice that relative noise of this size changes is a tie. Another order of summation changes scores by less."""


def rounding_of(graph: str, manifest: Manifest, compute: str) -> Rounding:
    """Return what an engine of `graph` rounds to. `compute` is the backend's description of its types."""
    if not manifest.weight_bytes(graph):
        # Selection is in fp32 everywhere; what it gathers and averages is of the graph's type.
        return manifest.precision
    # After `TOWER_IN` comes the description of another library that runs the tower.
    rest, _, tower = compute.partition(TOWER_IN)
    types, form = (tower or rest, manifest.weights.vision) if is_tower(graph) else (rest, manifest.weights.decoder)
    if "int8" in types and form in _INTEGERS:
        return "int8"
    floats: tuple[Rounding, ...] = ("bf16", "fp16")
    return next((rounding for rounding in floats if rounding in types), manifest.precision)


def limit_of(kind: OutputKind, rounding: Rounding) -> Limit:
    """Return the limit of an output. Of indices, except for ties, none may differ."""
    return Limit(0, 0) if kind == "indices" else Limit(*_LIMITS[rounding][kind])


def kind_of(output: TensorSpec) -> OutputKind:
    """Return how an output of a graph is compared."""
    if output.dtype == "int64":
        return "indices"
    if output.name == "logits":
        return "logits"
    if output.name in ("actions_out", "velocity"):
        return "actions"
    return "values" if output.name in ("norms", "salience") else "rows"


_ALIGNED_LEFT = ("engine", "in", "output", "method", "budget", "")


@dataclass(frozen=True)
class OutputReport:
    """The difference between an output of an engine and its graph's, over all calls."""

    kind: OutputKind
    typical: float | None
    """The relative difference of the median row, or the number of indices that differ. None if the output is not
    finite or has another shape."""
    worst: float | None
    """As `typical`, but of the worst row."""
    typical_limit: float
    worst_limit: float
    ties: int
    """The number of calls with a tie: the graph selects the engine's tokens with the least noise on its inputs."""
    passed: bool

    @property
    def share(self) -> float:
        """The largest share of a limit; infinite without a finite difference."""
        if self.typical is None or self.worst is None:
            return inf
        pairs = ((self.typical, self.typical_limit), (self.worst, self.worst_limit))
        return max(found / limit if limit else inf if found else 0.0 for found, limit in pairs)

    @property
    def explanation(self) -> str:
        """The difference and the limit, in words."""
        if self.kind == "indices":
            return f"{self.worst:.0f} indices differ, and none may"
        if self.worst is None or self.typical is None:
            return "its values are not finite, or it has another shape"
        one = self.kind.removesuffix("s")
        if self.typical > self.typical_limit:
            return f"the median {one} differs by {self.typical:.2g}, and may by {self.typical_limit:g}"
        return f"the worst {one} differs by {self.worst:.2g}, and may by {self.worst_limit:g}"


@dataclass(frozen=True)
class GraphReport:
    """The comparison of one engine with its graph."""

    rounding: Rounding
    """What the engine rounds to. Limits depend on it."""
    calls: int
    outputs: dict[str, OutputReport]

    @property
    def refused(self) -> str | None:
        """The first output that exceeds its limits, indices before the rows that they choose; None for a pass."""
        refused = [name for name, output in self.outputs.items() if not output.passed]
        return min(refused, key=lambda name: self.outputs[name].kind != "indices", default=None)


@dataclass(frozen=True)
class TextReport:
    """The comparison of an answer of all engines with the graphs' answer."""

    method: str
    budget: str
    expected: str
    found: str
    tokens: int
    same_tokens: int
    """The number of equal tokens before the first that differs."""
    gap: float
    """How much less likely the first token that differs is by the graphs' logits, in their standard deviations; 0 for
    equal texts."""
    gap_limit: float | None
    """None if other tokens were kept: such a text has no limit. The unpruned text always has one."""
    kept_alike: float
    """The smallest share of equal kept tokens of all steps."""
    passed: bool


@dataclass(frozen=True)
class ChunkReport:
    """The comparison of a policy's chunk of all engines with the graphs' chunk."""

    method: str
    budget: str
    steps: int
    """Denoising steps."""
    actions: int
    """The actions of the chunk."""
    worst_action: int
    """The action with the largest difference, counted from 1."""
    difference: float
    """The largest difference of a number, in standard deviations of the training data's actions."""
    limit: float | None
    """None if other tokens were kept: such a chunk has no limit. The unpruned chunk always has one. A chunk that a
    little noise changes much has a larger one (`judged_by_noise`)."""
    kept_alike: float
    """The smallest share of equal kept tokens of all steps."""
    passed: bool


@dataclass(frozen=True)
class GateReport:
    """The comparison of every engine with its graph, and of the answers or chunks of all engines."""

    bundle: str
    engines: str
    target: str
    library_version: str
    backend: str
    compute: str
    """The types that engines compute in, in words."""
    precision: str
    weights: WeightForms
    seen_share: tuple[float, ...]
    """For each picture, the share of its area that the model sees."""
    graphs: dict[str, GraphReport]
    texts: list[TextReport]
    """Empty for a policy, and if an engine was rejected: its answers mean nothing."""
    chunks: list[ChunkReport]
    """A policy's; empty if an engine was rejected."""
    captured: CaptureReport | None
    """What backends on CUDA captured; None for others."""
    passed: bool


def output_report(kind: OutputKind, errors: Array, rounding: Rounding, ties: int) -> OutputReport:
    """Return the report of an output from the `errors` of its rows in all calls. Only indices have `ties`."""
    limit, chosen = limit_of(kind, rounding), kind == "indices"
    if chosen:
        typical = worst = float(errors.sum())
    else:
        typical, worst = (float(function(errors)) if errors.size else 0.0 for function in (np.median, np.max))
    passed = typical <= limit.typical and worst <= limit.worst
    finite = isfinite(worst)
    found, most = (typical if finite else None), (worst if finite else None)
    return OutputReport(kind, found, most, *limit, ties if chosen else 0, passed)


def print_report(report: GateReport) -> None:
    """Print a row for each engine, with the output that is nearest to its limit, and one for each text or chunk."""
    console = TableConsole()
    console.print(
        f"{escaped(report.engines)}: {report.target} {escaped(report.library_version)}, {report.precision}, weights "
        f"{report.weights.name}, computes in {report.compute}",
        highlight=False,
        markup=False,
    )
    table = _table("engine", "in", "calls", "output", "median", "limit", "worst", "limit", "ties", "")
    for graph, own in report.graphs.items():
        name, output = max(own.outputs.items(), key=lambda item: item[1].share)
        table.add_row(
            escaped(graph),
            own.rounding,
            str(own.calls),
            escaped(name),
            _figure(output.typical),
            f"{output.typical_limit:g}",
            _figure(output.worst),
            f"{output.worst_limit:g}",
            str(sum(each.ties for each in own.outputs.values())),
            _verdict(own.refused is None),
        )
    console.print(table)
    if report.texts:
        table = _table("method", "budget", "same tokens", "gap", "limit", "kept alike %", "")
        for text in report.texts:
            _add_row(table, text, f"{text.same_tokens} of {text.tokens}", text.gap, text.gap_limit)
        console.print(table)
    if report.chunks:
        table = _table("method", "budget", "worst action", "difference", "limit", "kept alike %", "")
        for chunk in report.chunks:
            worst = f"{chunk.worst_action} of {chunk.actions}"
            _add_row(table, chunk, worst, chunk.difference, chunk.limit)
        console.print(table)


def _add_row(table: Table, report: TextReport | ChunkReport, place: str, found: float, limit: float | None) -> None:
    most, verdict = ("-", "not judged") if limit is None else (f"{limit:g}", _verdict(report.passed))
    plan = (escaped(report.method), escaped(report.budget))
    table.add_row(*plan, place, _figure(found), most, f"{100 * report.kept_alike:.1f}", verdict)


def _verdict(passed: bool) -> str:
    return "passed" if passed else "REJECTED"


def _table(*headings: str) -> Table:
    table = make_table([])
    for heading in headings:
        table.add_column(heading, justify="left" if heading in _ALIGNED_LEFT else "right", no_wrap=True)
    return table


def _figure(number: float | None) -> str:
    return "not finite" if number is None else f"{number:.2g}"


def first_refusal(report: GateReport, manifest: EnginesManifest) -> str | None:
    """Return the message for the first rejection, with the number of the others; None if all passed."""
    messages = [refusal(graph, own, manifest) for graph, own in report.graphs.items() if own.refused is not None]
    messages += refusals_together(report.texts, report.chunks, manifest)
    if not messages:
        return None
    more = len(messages) - 1
    return messages[0] + (f" {more} more {'was' if more == 1 else 'were'} rejected." if more else "")


def refusal(graph: str, report: GraphReport, manifest: EnginesManifest) -> str:
    """Return the message for the engine of `graph`, which exceeds its limits."""
    name = report.refused or next(iter(report.outputs))
    output = report.outputs[name]
    return (
        f"the engine of graph '{graph}', by {manifest.target} {manifest.library_version}, differs from the ONNX "
        f"graph in output '{name}': {output.explanation}. {_advice(graph, report, output, manifest)}"
    )


def refusals_together(
    texts: Sequence[TextReport], chunks: Sequence[ChunkReport], manifest: EnginesManifest
) -> list[str]:
    """Return a message for each answer and chunk of all engines that differs by more than its limit."""
    found: list[tuple[TextReport | ChunkReport, str, str, str]] = []
    for text in (text for text in texts if not text.passed):
        by = f"a token less likely by {text.gap:.2g} standard deviations of the logits, and it may be by"
        found.append((text, "answer", f"token {text.same_tokens + 1}", f"{by} {text.gap_limit:g}"))
    for chunk in (chunk for chunk in chunks if not chunk.passed):
        by = f"by {chunk.difference:.2g} standard deviations of the training data's actions, and it may by"
        found.append((chunk, "chunk", f"action {chunk.worst_action}", f"{by} {chunk.limit:g}"))
    return [
        f"each engine passes alone, but the {what} of all, by {manifest.target} {manifest.library_version}, differs "
        f"from the ONNX graphs at {place} of budget '{report.budget}' of method '{report.method}': {by}. Try another "
        f"picture; if the {what}s differ there too, build with another version of the library, or from a bundle of a "
        "finer --precision or --weights."
        for report, what, place, by in found
    ]


def _advice(graph: str, report: GraphReport, output: OutputReport, manifest: EnginesManifest) -> str:
    on_gpu = manifest.target.startswith("tensorrt")
    if is_tower(graph) and on_gpu:
        return (
            "fp16 vision towers have lost accuracy in silence on TensorRT 10.3: build with another version of the "
            "library, or export with --precision fp32 and run it on ort-cuda, ort-cpu or openvino."
        )
    if output.kind == "indices":
        method = graph.partition("/")[0]
        return (
            "It keeps other tokens, and selection is in fp32 everywhere: build again, or with another version of the "
            f"library. If it stays so, export the bundle without method '{method}' (docs/gate.md)."
        )
    if output.worst is None:
        return (
            "If its values exceed fp16 (65504), export with --precision fp32, or with --weights bf16 for openvino "
            "(openvino-gpu: run it with --compute fp32); if not, build again."
        )
    if report.rounding == "int8":
        return (
            "Build again; if it stays so, rows rounded to int8 are too coarse for this model: export with --weights "
            "bf16 or fp16" + ("." if on_gpu else ", or run it with --compute bf16 or fp32 where the backend can.")
        )
    if report.rounding == "bf16":
        return "Build again; if it stays so, bf16 is too coarse for this model: run it with --compute fp32."
    return "Build again, or with another version of the library."
