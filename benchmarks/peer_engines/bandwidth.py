"""How fast this machine reads memory: what no decode step can beat."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from sinkprune.contract.precision import Array

_BYTES, _PIECE, _REPEAT = 1 << 30, 1 << 22, 7


def read_gb_per_s(threads: int, size: int = _BYTES) -> float:
    """GB/s of a plain read of `size` bytes by so many threads, each its own part: the median of seven."""
    numbers = np.ones(size // 4, np.float32)
    parts = np.array_split(numbers, threads)
    with ThreadPoolExecutor(threads) as pool:
        times = []
        for _ in range(_REPEAT):
            start = time.perf_counter()
            list(pool.map(_read, parts))
            times.append(time.perf_counter() - start)
    return numbers.nbytes / statistics.median(times) / 1e9


def _read(numbers: Array) -> None:
    # Pieces, as numpy holds Python's lock between them only.
    for start in range(0, numbers.size, _PIECE // 4):
        np.maximum.reduce(numbers[start : start + _PIECE // 4])
