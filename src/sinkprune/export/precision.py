"""The float types of exported bundles, in ONNX and in numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from sinkprune.contract.errors import CheckpointError
from sinkprune.contract.precision import DTYPES, Array, PrecisionName

# This many values fit into a core's cache.
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Precision:
    """The type of hidden states, of caches, and of weights without a form of their own."""

    name: PrecisionName
    onnx: ir.DataType
    numpy: np.dtype[Any]

    def converted(self, name: str, array: Array) -> Array:
        """Return the checkpoint's tensor `name` in this type; raises `CheckpointError` if a value is not finite."""
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
    """Return whether all values of an fp16 or fp32 `array` are finite. numpy's own test takes nine times as long."""
    bits = np.dtype(np.uint16 if array.dtype == np.float16 else np.uint32)
    infinity = np.array(np.inf, array.dtype).view(bits)
    # In memory order, so that nothing is copied.
    values = array.ravel(order="K").view(bits)
    magnitude = ~np.array(-0.0, array.dtype).view(bits)
    chunks = (values[start : start + _CHUNK] for start in range(0, values.size, _CHUNK))
    return all(np.bitwise_and(chunk, magnitude).max() < infinity for chunk in chunks)
