"""How fast this machine reads memory: what no decode step can beat."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from sinkprune.contract.precision import Array

_BYTES, _PIECE = 1 << 29, 1 << 22


class PlainRead:
    """A buffer that is read whole, by so many threads, each its own part."""

    def __init__(self, threads: int, size: int = _BYTES) -> None:
        """`size` is in bytes: far more than any cache holds."""
        self._parts = np.array_split(np.ones(size // 4, np.float32), threads)
        self._pool = ThreadPoolExecutor(threads)

    def gb_per_s(self) -> float:
        """Read it once."""
        start = time.perf_counter()
        list(self._pool.map(_read, self._parts))
        return sum(part.nbytes for part in self._parts) / (time.perf_counter() - start) / 1e9


def _read(numbers: Array) -> None:
    # Pieces, as numpy holds Python's lock between them only.
    for start in range(0, numbers.size, _PIECE // 4):
        np.maximum.reduce(numbers[start : start + _PIECE // 4])
