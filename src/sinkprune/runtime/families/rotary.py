"""Rotary position tables, computed on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sinkprune.contract.precision import Array


class Positions(NamedTuple):
    """The positions of a prompt's rows."""

    rows: Array
    """[S], or [A,S] for positions of A axes."""
    next: int
    """The position of the first new token, the same on every axis."""


class Rotary:
    """Makes tables of rotary embedding with base `theta` for heads of `head_dim`.

    Without `sections` positions have one axis. In mRoPE they have three, and section i is the number of frequencies
    that rotate with axis i modulo 3 (Qwen2-VL's report, section 2.1).
    """

    def __init__(
        self, theta: float, head_dim: int, dtype: np.dtype[Any], sections: Sequence[int] = (), factor: float = 1.0
    ) -> None:
        """Take the base and the sections; positions are divided by `factor`."""
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        self._frequencies = (1.0 / np.float32(theta) ** exponents / np.float32(factor)).astype(np.float32)
        sections = sections or (len(exponents),)
        self._axis = np.repeat(np.arange(len(sections)) % 3, sections)
        self._dtype = dtype

    def tables(self, positions: Array) -> tuple[Array, Array]:
        """Return cos and sin [1,S,head_dim/2] for `positions` [S], or [3,S] in mRoPE; angles in fp32.

        Positions [S] are the same on every axis.
        """
        axes = np.broadcast_to(positions, (self._axis.max() + 1, positions.shape[-1]))
        angles = axes.astype(np.float32)[self._axis].T * self._frequencies
        return np.cos(angles)[None].astype(self._dtype), np.sin(angles)[None].astype(self._dtype)
