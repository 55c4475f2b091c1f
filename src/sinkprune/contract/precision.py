"""Number types of a bundle: the type of states and caches, and the storage forms of weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np

from sinkprune.contract.checks import Bounds

Array = np.ndarray[Any, Any]
"""An array on the host; docstrings give shape and type."""
PrecisionName = Literal["fp32", "fp16"]

DTYPES: dict[PrecisionName, np.dtype[Any]] = {"fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16)}
"""The float types of a bundle: hidden states, caches, and all weights without a form of their own."""

WeightsName = Literal["fp32", "fp16", "bf16", "int8", "int4", "uint4"]
"""The storage form of the matrix of a linear layer: floats; int8 with a scale for each output; int4 with a scale for
each block of inputs; uint4 with a scale and a zero point for each block. If the checkpoint was quantised in groups,
int8 has blocks too."""
BLOCK_SIZES = (32, 64, 128)
"""The largest numbers of inputs that may share a scale."""


@dataclass(frozen=True)
class WeightForms:
    """The storage forms of a bundle's matrices."""

    decoder: WeightsName
    """Of the decoder, the projector and the head."""
    vision: WeightsName
    """Of the vision tower."""
    block_size: Annotated[int, Bounds(min(BLOCK_SIZES), max(BLOCK_SIZES))] | None
    """The largest number of inputs that share a scale. A matrix has the largest blocks up to this size that divide
    its inputs. None if no form has blocks."""

    @property
    def name(self) -> str:
        """Return both forms: "int4", or "int4, vision int8" if they differ."""
        return self.decoder if self.decoder == self.vision else f"{self.decoder}, vision {self.vision}"

    def beside(self, precision: str) -> str:
        """Return a bundle's `precision`, and the forms where they differ: "fp32", or "fp32, weights int8"."""
        return precision if self.name == precision else f"{precision}, weights {self.name}"
