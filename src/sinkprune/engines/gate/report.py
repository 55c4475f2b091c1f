"""The gate's report: what `sinkprune-check --json` writes, field by field, and the messages for rejected engines."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import numpy as np

from sinkprune.contract.engines_manifest import EnginesManifest
from sinkprune.contract.precision import Array, WeightForms
from sinkprune.engines.gate.limits import Limit, Rounding


@dataclass(frozen=True)
class OutputReport:
    """How far an output of an engine is from its graph's, in all calls together."""

    kind: str
    """What was compared: `rows` of states, `values` of tokens, `logits`, or `indices`."""
    typical: float | None
    """Of indices how many differ; else the relative difference of the median row. None for what is not finite or of
    another shape."""
    worst: float | None
    """Of indices as `typical`; else that of the worst row."""
    typical_limit: float
    worst_limit: float
    ties: int
    """In how many calls a choice fell otherwise where the graph's own does under the least noise."""
    passed: bool

    @property
    def told(self) -> str:
        """What was found and what may be, in words."""
        if self.kind == "indices":
            return f"{self.worst:.0f} indices differ, and none may"
        if self.worst is None or self.typical is None:
            return "what it gives is not finite, or of another shape"
        one = {"rows": "row", "values": "value", "logits": "logit"}[self.kind]
        if self.typical > self.typical_limit:
            return f"the median {one} differs by {self.typical:.2g}, and may by {self.typical_limit:g}"
        return f"the worst {one} differs by {self.worst:.2g}, and may by {self.worst_limit:g}"


@dataclass(frozen=True)
class GraphReport:
    """One engine beside its graph."""

    rounding: Rounding
    """What the engine rounds to, by which limits are chosen."""
    calls: int
    outputs: dict[str, OutputReport]

    @property
    def refused(self) -> str | None:
        """The first output that is past its limits; None for an engine that passed."""
        return next((name for name, output in self.outputs.items() if not output.passed), None)


@dataclass(frozen=True)
class TextReport:
    """What the whole chain of engines says, beside that of the graphs."""

    method: str
    budget: str
    expected: str
    found: str
    tokens: int
    same_tokens: int
    """How many are the same from the first on."""
    gap: float
    """Where texts part, how much less likely the engines' token is by the graphs' logits, in standard deviations of
    those; 0 where texts are the same."""
    gap_limit: float | None
    """None where other tokens were kept: such a text is told and not judged, the unpruned one always is."""
    kept_alike: float
    """The share of the tokens kept by the graphs that the engines, by norms, salience and scores of their own, keep
    too; of the step where it is the smallest."""
    passed: bool


@dataclass(frozen=True)
class GateReport:
    """Every engine beside its graph, and the answers of all together."""

    bundle: str
    engines: str
    target: str
    library_version: str
    backend: str
    compute: str
    """What engines compute in, in words."""
    precision: str
    weights: WeightForms
    graphs: dict[str, GraphReport]
    texts: list[TextReport]
    """Empty where an engine was refused: what it says is of no meaning."""
    passed: bool


def output_report(kind: str, errors: Array, limit: Limit, ties: int) -> OutputReport:
    """The report of an output whose rows, in all calls, differ by `errors`."""
    typical, worst = (float(function(errors)) if errors.size else 0.0 for function in (np.median, np.max))
    if kind == "indices":
        typical = worst = float(errors.sum())
    passed = typical <= limit.typical and worst <= limit.worst
    told = [number if isfinite(worst) else None for number in (typical, worst)]
    return OutputReport(kind, told[0], told[1], limit.typical, limit.worst, ties, passed)


def refusal(graph: str, report: GraphReport, manifest: EnginesManifest) -> str:
    """The message for the engine of `graph`, which is past its limits."""
    name = report.refused or next(iter(report.outputs))
    output = report.outputs[name]
    library = f"{manifest.target} {manifest.library_version}"
    return (
        f"the engine of graph '{graph}', by {library}, differs from the ONNX graph in output '{name}': "
        f"{output.told}. "
        f"{_what_to_try(graph, report, output, manifest)}"
    )


def text_refusal(text: TextReport, manifest: EnginesManifest) -> str:
    """The message for a chain whose answer parts from the graphs' where it should not."""
    return (
        f"all engines pass alone, and what they say together, by {manifest.target} {manifest.library_version}, parts "
        f"from the ONNX graphs at token {text.same_tokens + 1} of budget '{text.budget}' of method '{text.method}': "
        f"a token less likely by {text.gap:.2g} standard deviations of the logits, and it may be by "
        f"{text.gap_limit:g}. Try another picture; if it parts there too, build with another version of the library, "
        "or from a bundle of a finer --precision or --weights."
    )


def first_refusal(report: GateReport, manifest: EnginesManifest) -> str | None:
    """The message for what was refused first, with how many more there are; None where all passed."""
    told = [refusal(graph, own, manifest) for graph, own in report.graphs.items() if own.refused is not None]
    told += [text_refusal(text, manifest) for text in report.texts if not text.passed]
    if not told:
        return None
    more = f" {len(told) - 1} more {'was' if len(told) == 2 else 'were'} refused." if len(told) > 1 else ""
    return told[0] + more


def _what_to_try(graph: str, report: GraphReport, output: OutputReport, manifest: EnginesManifest) -> str:
    on_gpu = manifest.target.startswith("tensorrt")
    if graph == "vision" and on_gpu:
        return (
            "fp16 vision towers have lost accuracy in silence on TensorRT 10.3: build with another version of the "
            "library, or export with --precision fp32 and run it on ort-cuda, ort-cpu or openvino."
        )
    if output.kind == "indices":
        return (
            "It keeps other tokens, and selection is in fp32 everywhere: build again, or with another version of the "
            "library."
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
