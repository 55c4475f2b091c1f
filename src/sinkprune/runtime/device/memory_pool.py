"""Device memory for tensors, in blocks that are reused in a fixed order after their last reference is gone.

All work runs on one stream, in order. So a block may be reused while earlier work on it is still enqueued: later
writes run after earlier reads.
"""

from __future__ import annotations

import heapq
import weakref

from sinkprune.contract.errors import BackendError
from sinkprune.runtime.device import Address, Device

_SMALLEST = 1024


class Block:
    """A piece of device memory, which its pool reuses when the last reference to this object is gone."""

    __slots__ = ("__weakref__", "address", "size")

    def __init__(self, address: Address, size: int) -> None:
        self.address, self.size = address, size


class MemoryPool:
    """Allocates blocks of device memory by size class, the oldest free block first.

    So the same allocations, starting with the same blocks held, get the same addresses, from the first time on and
    however the pool grew in between. Captured CUDA graphs hold addresses, and can be replayed in every frame.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._created = 0
        self._free: dict[int, list[tuple[int, Address]]] = {}

    def allocate(self, size: int) -> Block:
        """Return a block of at least `size` bytes, never at address 0, also for 0 bytes.

        Raises `BackendError` with needed and free bytes if the device has no room and no block is free.
        """
        size = size_class(size)
        free = self._free.setdefault(size, [])
        if free:
            number, address = heapq.heappop(free)
        else:
            number, address = self._created, self._grow(size)
            self._created += 1
        block = Block(address, size)
        # At exit the driver frees everything.
        weakref.finalize(block, heapq.heappush, free, (number, address)).atexit = False
        return block

    def _grow(self, size: int) -> Address:
        try:
            return self._device.allocate(size)
        except BackendError:
            if not self._trim():
                raise
        return self._device.allocate(size)

    def _trim(self) -> bool:
        """Free the unused blocks of all sizes. Return whether there were any."""
        addresses = [address for free in self._free.values() for _, address in free]
        # Enqueued work may still use them.
        self._device.synchronize()
        for address in addresses:
            self._device.free(address)
        for free in self._free.values():
            free.clear()
        return bool(addresses)


def size_class(size: int) -> int:
    """Return the bytes of a block for `size` bytes: the least power of two, or three quarters of one, that fits."""
    power = 1 << (max(size, _SMALLEST) - 1).bit_length()
    return power * 3 // 4 if _SMALLEST < size <= power * 3 // 4 else power
