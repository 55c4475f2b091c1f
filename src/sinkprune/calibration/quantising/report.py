"""The errors of quantised weights: in each layer's output, and in the logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sinkprune.contract.precision import Array, WeightForms
from sinkprune.export.weights.calibrated_rounding import CalibratedMatrix, OutputErrors


@dataclass(frozen=True)
class LayerError:
    """The error of a layer's output without its bias, over all rows of the prompts."""

    relative_l2: float
    """The length of the error over that of the output."""
    cosine: float
    """The cosine of the angle between the output and the exact one."""


@dataclass(frozen=True)
class LayerReport:
    """The quantised weights of one linear layer."""

    graph: str
    matrix: str
    """Its name; layers that share a matrix in the graph have a report each, with their own matrix's name."""
    inputs: int
    outputs: int
    bits: int
    error: LayerError
    to_nearest: LayerError
    """If every weight had been rounded to the nearest."""


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
        return sorted(self.layers, key=lambda layer: -layer.error.relative_l2)


def layer_reports(graph: str, parts: Mapping[str, int], bits: int, found: CalibratedMatrix) -> list[LayerReport]:
    """Return the reports of layers that share a matrix; `parts` are their matrices and outputs, in order."""
    reports, start, inputs = [], 0, found.rounded.codes.shape[1]
    for matrix, outputs in parts.items():
        rows = slice(start, start + outputs)
        error, to_nearest = (
            _layer_error(found.length[rows], errors, rows) for errors in (found.errors, found.nearest_errors)
        )
        reports.append(LayerReport(graph, matrix, inputs, outputs, bits, error, to_nearest))
        start += outputs
    return reports


def _layer_error(lengths: Array, errors: OutputErrors, rows: slice) -> LayerError:
    length, square, along = (
        float(x.sum(dtype=np.float64)) for x in (lengths, errors.square[rows], errors.along[rows])
    )
    longest = length * (length + 2 * along + square)
    cosine = min((length + along) / longest**0.5, 1.0) if longest > 0 else 1.0
    return LayerError((square / length) ** 0.5 if length > 0 else 0.0, cosine)


def logit_error(exact: Sequence[Array], found: Sequence[Array]) -> LogitError:
    """Return the error of the `found` logits [vocab] of each prompt against the `exact` ones."""
    p, q = np.array(exact, np.float64), np.array(found, np.float64)
    log_p, log_q = _log_softmax(p), _log_softmax(q)
    return LogitError(
        relative_l2=float(np.linalg.norm(q - p) / np.linalg.norm(p)),
        kl=float((np.exp(log_p) * (log_p - log_q)).sum(axis=-1).mean()),
        top_1=float((p.argmax(axis=-1) == q.argmax(axis=-1)).mean()),
    )


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
