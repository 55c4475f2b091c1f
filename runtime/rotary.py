"""Rotary position tables, computed on the host for the rows at hand."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class Rotary:
    """Tables of plain rotary embedding with base `theta` for heads of `head_dim`."""

    def __init__(self, theta: float, head_dim: int, dtype: np.dtype[Any]) -> None:
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        self._frequencies = (1.0 / np.float32(theta) ** exponents).astype(np.float32)
        self._dtype = dtype

    def tables(self, positions: Array) -> tuple[Array, Array]:
        """cos and sin [1,S,head_dim/2] for `positions` [S], angles in fp32."""
        angles = positions.astype(np.float32)[:, None] * self._frequencies
        return np.cos(angles)[None].astype(self._dtype), np.sin(angles)[None].astype(self._dtype)
