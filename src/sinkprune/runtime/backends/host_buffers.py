"""Host memory for caches: blocks that come back when nobody holds them, so that requests take turns in the same."""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections import deque
from threading import Lock

import numpy as np

from sinkprune.contract.precision import Array

# Of a cache line and of the widest vector: what starts elsewhere is read in two.
_ALIGNMENT = 64


class HostBuffers:
    """Lends blocks of host memory, the smallest free one that is large enough.

    Where none is, the largest free one is given back to the system for it: there are never more blocks than were held
    at once, and they do not outgrow what was asked for.
    """

    def __init__(self) -> None:
        self._free: list[Array] = []
        # What comes back does so at any moment, in any thread: in the midst of `lend`, too.
        self._returned: deque[Array] = deque()
        self._lock = Lock()

    def lend(self, size: int) -> Array:
        """uint8 [`size`] that may hold anything; whoever holds it or a view of it holds the memory."""
        with self._lock:
            block = self._block(size)
        start = -block.ctypes.data % _ALIGNMENT
        # Of a view on a memoryview further views know, and hold; of one on an array they know the array only.
        lent = np.frombuffer(block.data[start : start + size], np.uint8)
        weakref.finalize(lent, self._returned.append, block).atexit = False
        return lent

    def _block(self, size: int) -> Array:
        while self._returned:
            insort(self._free, self._returned.popleft(), key=_size)
        place = bisect_left(self._free, size, key=_size)
        if place < len(self._free):
            return self._free.pop(place)
        if self._free:
            self._free.pop()
        return np.empty(size + _ALIGNMENT, np.uint8)


def _size(block: Array) -> int:
    """How much can be lent of it."""
    return block.nbytes - _ALIGNMENT
