"""What quantised weights change: of each layer's output, and of the logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sinkprune.contract.precision import Array, WeightForms
from sinkprune.export.weights.calibrated_rounding import Calibrated, Off


@dataclass(frozen=True)
class OutputError:
    """How far what a layer gives is off, over all rows of the prompts and without its bias."""

    relative_l2: float
    """The length of the error over that of the output."""
    cosine: float
    """Of the angle between the output and the one it should be."""


@dataclass(frozen=True)
class LayerReport:
    """What became of one linear layer."""

    graph: str
    matrix: str
    """Its name; of layers that share a matrix in the graph, each has a report and its own matrix's name."""
    inputs: int
    outputs: int
    bits: int
    error: OutputError
    to_nearest: OutputError
    """If every weight had been rounded to the nearest."""


@dataclass(frozen=True)
class LogitError:
    """How far the first new token's logits are off, over all prompts."""

    relative_l2: float
    """The length of the error over that of the logits."""
    kl: float
    """Kullback-Leibler divergence from the float weights' probabilities, in nats; the mean."""
    top_1: float
    """The share of prompts whose most likely token is the same."""


@dataclass(frozen=True)
class QuantisationReport:
    """A bundle's quantised weights against its floats, on the pictures and prompts they were rounded for."""

    model: str
    precision: str
    weights: WeightForms
    prompts: int
    rows: int
    """Rows that the decoder was given, of text and pictures."""
    layers: tuple[LayerReport, ...]
    """In the order in which they run."""
    logits: LogitError
    to_nearest: LogitError
    """If every weight had been rounded to the nearest."""
    warnings: tuple[str, ...]
    """Sentences: why the figures say little, for example too few prompts."""

    @property
    def worst(self) -> list[LayerReport]:
        """All layers, those furthest off first."""
        return sorted(self.layers, key=lambda layer: -layer.error.relative_l2)


def layer_reports(graph: str, parts: Mapping[str, int], bits: int, found: Calibrated) -> list[LayerReport]:
    """Of the layers that share a matrix: `parts` are the names of their own matrices and their outputs, in order."""
    reports, start, inputs = [], 0, found.rounded.codes.shape[1]
    for matrix, outputs in parts.items():
        rows = slice(start, start + outputs)
        error, to_nearest = (_output_error(found.length[rows], off, rows) for off in (found.off, found.nearest_off))
        reports.append(LayerReport(graph, matrix, inputs, outputs, bits, error, to_nearest))
        start += outputs
    return reports


def _output_error(lengths: Array, off: Off, rows: slice) -> OutputError:
    length, square, along = (float(x.sum(dtype=np.float64)) for x in (lengths, off.square[rows], off.along[rows]))
    longest = length * (length + 2 * along + square)
    cosine = min((length + along) / longest**0.5, 1.0) if longest > 0 else 1.0
    return OutputError((square / length) ** 0.5 if length > 0 else 0.0, cosine)


def logit_error(exact: Sequence[Array], found: Sequence[Array]) -> LogitError:
    """`found` logits [vocab] of each prompt against the `exact` ones."""
    wanted, given = np.array(exact, np.float64), np.array(found, np.float64)
    likely, told = _log_softmax(wanted), _log_softmax(given)
    return LogitError(
        relative_l2=float(np.linalg.norm(given - wanted) / np.linalg.norm(wanted)),
        kl=float((np.exp(likely) * (likely - told)).sum(axis=-1).mean()),
        top_1=float((wanted.argmax(axis=-1) == given.argmax(axis=-1)).mean()),
    )


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    found: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return found
