"""The allowed differences between an engine and its graph, by the type that the engine rounds to.

Each limit but one is at least three times the largest difference of correct engines of small models: the median row
in int8 is at 2.4 times, where a larger limit would hide faults. docs/gate.md has the figures.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from sinkprune.contract.manifest import Manifest, TensorSpec
from sinkprune.contract.precision import WeightsName
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

_LIMITS: dict[Rounding, dict[OutputKind, Limit]] = {
    "fp32": dict.fromkeys(("rows", "values", "logits", "actions"), Limit(1e-4, 1e-3)),
    "fp16": {
        "rows": Limit(0.005, 0.03),
        "values": Limit(0.01, 0.06),
        "logits": Limit(0.003, 0.02),
        "actions": Limit(0.004, 0.04),
    },
    "bf16": {
        "rows": Limit(0.04, 0.25),
        "values": Limit(0.1, 0.5),
        "logits": Limit(0.01, 0.06),
        "actions": Limit(0.08, 0.6),
    },
    "int8": {
        "rows": Limit(0.06, 0.4),
        "values": Limit(0.2, 1.5),
        "logits": Limit(0.02, 0.12),
        "actions": Limit(0.1, 0.7),
    },
}
_GAPS: dict[Rounding, float] = {"fp32": 1e-3, "fp16": 0.1, "bf16": 0.3, "int8": 0.5}
_CHUNKS: dict[Rounding, float] = {"fp32": 1e-3, "fp16": 0.12, "bf16": 1.2, "int8": 1.6}
TIE = 1e-5
"""A choice that relative noise of this size changes is a tie. Another order of summation changes scores by less."""


def rounding_of(graph: str, manifest: Manifest, compute: str) -> Rounding:
    """Return what an engine of `graph` rounds to. `compute` is the backend's description of its types."""
    if not manifest.weight_bytes(graph):
        # Selection is in fp32 everywhere; what it gathers and averages is of the graph's type.
        return manifest.precision
    # After `TOWER_IN` comes the description of another library that runs the tower.
    rest, _, tower = compute.partition(TOWER_IN)
    types, form = (tower or rest, manifest.weights.vision) if graph == "vision" else (rest, manifest.weights.decoder)
    if "int8" in types and form in _INTEGERS:
        return "int8"
    floats: tuple[Rounding, ...] = ("bf16", "fp16")
    return next((rounding for rounding in floats if rounding in types), manifest.precision)


def coarsest_rounding(manifest: Manifest, compute: str) -> Rounding:
    """Return the coarsest rounding of all graphs."""
    return max((rounding_of(graph, manifest, compute) for graph in manifest.graphs), key=ROUNDINGS.index)


def limit_of(kind: OutputKind, rounding: Rounding) -> Limit:
    """Return the limit of an output. Of indices, except for ties, none may differ."""
    return Limit(0, 0) if kind == "indices" else _LIMITS[rounding][kind]


def gap_limit(rounding: Rounding, kept_alike: float) -> float | None:
    """Return how much less likely the engines' token may be than the graphs', where two texts part.

    In standard deviations of the graphs' logits there. None if other tokens were kept, by another order of rounded
    norms, salience or scores: the texts may then differ.
    """
    return _GAPS[rounding] if kept_alike == 1 else None


def chunk_limit(rounding: Rounding, kept_alike: float) -> float | None:
    """Return how much a number of the engines' chunk may differ from the graphs', after all denoising steps.

    In standard deviations of the training data's actions. None if other tokens were kept, as in `gap_limit`.
    """
    return _CHUNKS[rounding] if kept_alike == 1 else None


def kind_of(output: TensorSpec) -> OutputKind:
    """Return how an output of a graph is compared."""
    if output.dtype == "int64":
        return "indices"
    if output.name == "logits":
        return "logits"
    if output.name in ("actions_out", "velocity"):
        return "actions"
    return "values" if output.name in ("norms", "salience") else "rows"
