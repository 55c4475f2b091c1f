"""Arrays, and what numbers a bundle is made of: the type of states and caches, and the forms of weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np

from sinkprune.contract.checks.fields import Bounds

Array = np.ndarray[Any, Any]
"""A host array; docstrings give shape and type."""
PrecisionName = Literal["fp32", "fp16"]

DTYPES: dict[PrecisionName, np.dtype[Any]] = {"fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16)}
"""The float types a bundle can be exported in, as graphs name them: hidden states, caches, and all weights that have
no form of their own."""

WeightsName = Literal["fp32", "fp16", "bf16", "int8", "int4", "uint4"]
"""How the matrix of a linear layer is stored. Floats; int8 with one scale an output; int4 with one scale for each
block of inputs; uint4 with a zero point beside each of these scales. Of a checkpoint that was quantised in groups of
its own int8 is kept in blocks too."""
BLOCK_SIZES = (32, 64, 128)
"""How many inputs may share a scale in blocks, at most."""


@dataclass(frozen=True)
class WeightForms:
    """The forms that a bundle's matrices are stored in."""

    decoder: WeightsName
    """Of the decoder, the projector and the head."""
    vision: WeightsName
    """Of the vision tower."""
    block_size: Annotated[int, Bounds(min(BLOCK_SIZES), max(BLOCK_SIZES))] | None
    """The most inputs that share a scale: a matrix has the largest blocks up to it that divide its inputs. None where
    no form has blocks."""

    @property
    def name(self) -> str:
        """Both forms in one word: "int4", or "int4, vision int8" where they differ."""
        return self.decoder if self.decoder == self.vision else f"{self.decoder}, vision {self.vision}"
