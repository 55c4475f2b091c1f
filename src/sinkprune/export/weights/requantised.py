"""The errors of matrices that a checkpoint had quantised and an export rounded a second time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot
from typing import Any

import numpy as np

from sinkprune.contract.precision import Array


@dataclass(frozen=True)
class Requantised:
    """A matrix that was rounded a second time."""

    layer: str
    norm: float
    """The root of the sum of its squares."""
    error: float
    """The root of the sum of the squares of its difference from the checkpoint."""

    @classmethod
    def between(cls, layer: str, weight: Array, found: Array) -> Requantised:
        """Compare the matrix `layer` of values `weight` with its rounded values `found`."""
        return cls(layer, float(np.linalg.norm(weight)), float(np.linalg.norm(found - weight)))

    @property
    def relative_error(self) -> float:
        """The error divided by the norm; 0 for a matrix of zeros."""
        return self.error / self.norm if self.norm else 0.0


def summary(layers: Sequence[Requantised]) -> dict[str, Any]:
    """Return the number of layers, their relative L2 error together, and the layer with the largest error."""
    together = Requantised("", hypot(*(layer.norm for layer in layers)), hypot(*(layer.error for layer in layers)))
    largest = max(layers, key=lambda layer: layer.relative_error)
    return {
        "layers": len(layers),
        "relative_error": together.relative_error,
        "largest": {"layer": largest.layer, "relative_error": largest.relative_error},
    }
