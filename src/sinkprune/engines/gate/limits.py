"""How much an engine's outputs may differ from its graph's, by what its library rounds on the way.

A fault is found where it is larger than rounding. Each limit is at least three times what honest engines of the
small checkpoints of the tests and of the pocket model came to; docs/gate.md has the figures.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from sinkprune.contract.manifest import Manifest
from sinkprune.contract.precision import WeightsName
from sinkprune.runtime.backends.known import TOWER_IN

Rounding = Literal["fp32", "fp16", "bf16", "int8"]
"""The coarsest type that an engine rounds to on its way: `int8` are rows that meet quantised weights."""
ROUNDINGS: tuple[Rounding, ...] = ("fp32", "fp16", "bf16", "int8")
"""From the finest to the coarsest."""
_INTEGERS: tuple[WeightsName, ...] = ("int8", "int4", "uint4")


class Limit(NamedTuple):
    """The most that the rows of an output may differ, relatively: the median one, and the worst."""

    typical: float
    worst: float


Kind = Literal["rows", "values", "logits"]
"""What is compared of an output of floats: whole rows of states, one value a token (norms, salience), or logits."""

LIMITS: dict[Rounding, dict[Kind, Limit]] = {
    "fp32": {"rows": Limit(1e-4, 1e-3), "values": Limit(1e-4, 1e-3), "logits": Limit(1e-4, 1e-3)},
    "fp16": {"rows": Limit(0.005, 0.03), "values": Limit(0.01, 0.06), "logits": Limit(0.003, 0.02)},
    "bf16": {"rows": Limit(0.04, 0.15), "values": Limit(0.1, 0.5), "logits": Limit(0.01, 0.06)},
    "int8": {"rows": Limit(0.06, 0.25), "values": Limit(0.2, 1.5), "logits": Limit(0.02, 0.12)},
}
"""By the rounding of an engine and the kind of an output."""
EXACT = Limit(0, 0)
"""Of indices: how many may differ, but for ties."""
_GAPS: dict[Rounding, float] = {"fp32": 1e-3, "fp16": 0.1, "bf16": 0.3, "int8": 0.5}
TIE = 1e-5
"""How much, relatively, summing in another order may move a score: what noise of this size changes is a tie."""


def rounding_of(graph: str, manifest: Manifest, compute: str) -> Rounding:
    """What an engine of `graph` rounds to where its backend computes in `compute`, in that one's words."""
    if not manifest.weight_bytes(graph):
        # Selection is in fp32 everywhere; what it gathers and averages is of the graph's type.
        return manifest.precision
    # Where another library runs the tower, its words stand behind those of the rest.
    rest, _, tower = compute.partition(TOWER_IN)
    told, form = (tower or rest, manifest.weights.vision) if graph == "vision" else (rest, manifest.weights.decoder)
    if "int8" in told and form in _INTEGERS:
        return "int8"
    floats: tuple[Rounding, ...] = ("bf16", "fp16")
    return next((rounding for rounding in floats if rounding in told), manifest.precision)


def coarsest(manifest: Manifest, compute: str) -> Rounding:
    """The coarsest rounding of all graphs."""
    return max((rounding_of(graph, manifest, compute) for graph in manifest.graphs), key=ROUNDINGS.index)


def gap_limit(rounding: Rounding, kept_alike: float) -> float | None:
    """Where two texts part, how much less likely the engines' token may be than the graphs'.

    In standard deviations of the graphs' logits there, for a chain of that `rounding`. None where norms, salience or
    scores were rounded to another order: other tokens are kept, and what is said of them tells nothing of engines.
    """
    return _GAPS[rounding] if kept_alike == 1 else None


def kind_of(output: str) -> Kind:
    """How the output of that name, which holds floats, is compared."""
    if output == "logits":
        return "logits"
    return "values" if output in ("norms", "salience") else "rows"
