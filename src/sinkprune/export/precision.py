"""The float types a bundle can be exported in, as graphs name them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from sinkprune.contract.errors import CheckpointError
from sinkprune.contract.precision import DTYPES, Array, PrecisionName

# As many values fit a core's cache.
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Precision:
    """The type of hidden states and caches, and of weights that have no form of their own."""

    name: PrecisionName
    onnx: ir.DataType
    numpy: np.dtype[Any]

    def converted(self, name: str, array: Array) -> Array:
        """The tensor `name` of a checkpoint in this type; raises `CheckpointError` where it is not finite in it."""
        with np.errstate(over="ignore"):
            converted: Array = array.astype(self.numpy, copy=False)
        if _all_finite(converted):
            return converted
        if not np.isfinite(array).all():
            raise CheckpointError(
                f"tensor '{name}' holds NaN or infinity, expected finite numbers. The weights are damaged: download "
                "them again."
            )
        found, most = np.abs(array.astype(np.float64)).max(), np.finfo(self.numpy).max
        remedy = "Export with --precision fp32." if self.name == "fp16" else "No precision can hold it."
        raise CheckpointError(
            f"tensor '{name}' holds values up to {found:.3g}, expected at most {most:.6g}, as {self.name} can hold. "
            f"{remedy}"
        )


PRECISIONS: dict[str, Precision] = {
    name: Precision(name, ir.DataType.from_numpy(dtype), dtype) for name, dtype in DTYPES.items()
}


def _all_finite(array: Array) -> bool:
    """Whether no value of an fp16 or fp32 `array` is NaN or infinity; numpy's own test takes nine times as long."""
    bits = np.dtype(np.uint16 if array.dtype == np.float16 else np.uint32)
    infinity = np.array(np.inf, array.dtype).view(bits)
    # All values, in whichever order they lie.
    values = array.ravel(order="K").view(bits)
    magnitude = ~np.array(-0.0, array.dtype).view(bits)
    chunks = (values[start : start + _CHUNK] for start in range(0, values.size, _CHUNK))
    return all(np.bitwise_and(chunk, magnitude).max() < infinity for chunk in chunks)
