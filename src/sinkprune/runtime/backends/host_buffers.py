"""Host memory for KV caches: blocks return to a pool with their last reference, and later requests reuse them."""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections import deque
from threading import Lock

import numpy as np

from sinkprune.contract.precision import Array

# The size of a cache line and of the widest vector: unaligned reads take two accesses.
_ALIGNMENT = 64


class HostBuffers:
    """A pool that lends the smallest free block that is large enough.

    Where none is, it frees the largest free block and allocates a new one. So there are never more blocks than were
    in use at once, and none is larger than a request needed.
    """

    def __init__(self) -> None:
        self._free: list[Array] = []
        # Filled by finalizers, which may run in any thread at any moment, also within `lend`.
        self._returned: deque[Array] = deque()
        self._lock = Lock()

    def lend(self, size: int) -> Array:
        """Return uint8 [`size`] with any content; the block returns with its last reference or view."""
        with self._lock:
            block = self._block(size)
        start = -block.ctypes.data % _ALIGNMENT
        # Views of a memoryview's array keep that array alive. Views of an array keep only its base alive.
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
    """Return how many bytes of a block can be lent."""
    return block.nbytes - _ALIGNMENT
