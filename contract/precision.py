"""Arrays, and the float types of a bundle by name: weights, hidden states and caches are of one of them."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

Array = np.ndarray[Any, Any]
"""A host array; docstrings give shape and type."""
PrecisionName = Literal["fp32", "fp16"]

DTYPES: dict[PrecisionName, np.dtype[Any]] = {"fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16)}
