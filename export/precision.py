"""The float types a bundle can be exported in, as graphs name them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from sinkprune.contract.precision import DTYPES, PrecisionName


@dataclass(frozen=True)
class Precision:
    """The type of weights, hidden states and caches."""

    name: PrecisionName
    onnx: ir.DataType
    numpy: np.dtype[Any]


PRECISIONS: dict[str, Precision] = {
    name: Precision(name, ir.DataType.from_numpy(dtype), dtype) for name, dtype in DTYPES.items()
}
