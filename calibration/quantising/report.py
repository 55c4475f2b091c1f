"""What quantised weights change: of each layer's output, and of the logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sinkprune.contract.precision import Array, WeightForms
from sinkprune.export.calibrated_rounding import Calibrated, Off


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

    @property
    def worst(self) -> list[LayerReport]:
        """All layers, those furthest off first."""
        return sorted(self.layers, key=lambda layer: -layer.error.relative_l2)


def output_errors(found: Calibrated) -> tuple[OutputError, OutputError]:
    """Of a layer, and if every weight had been rounded to the nearest."""
    return _output_error(found.length, found.off), _output_error(found.length, found.nearest_off)


def _output_error(length: float, off: Off) -> OutputError:
    longest = length * (length + 2 * off.along + off.square)
    cosine = min((length + off.along) / longest**0.5, 1.0) if longest > 0 else 1.0
    return OutputError((off.square / length) ** 0.5 if length > 0 else 0.0, cosine)


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
