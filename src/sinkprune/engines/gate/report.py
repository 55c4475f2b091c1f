"""The gate's report: what `sinkprune-check --json` writes, field by field."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import numpy as np

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
