"""The float types a bundle can be exported in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx_ir as ir


@dataclass(frozen=True)
class Precision:
    """The type of weights, hidden states and caches."""

    name: Literal["fp32", "fp16"]
    onnx: ir.DataType
    numpy: np.dtype[Any]


PRECISIONS = {
    "fp32": Precision("fp32", ir.DataType.FLOAT, np.dtype(np.float32)),
    "fp16": Precision("fp16", ir.DataType.FLOAT16, np.dtype(np.float16)),
}
