"""KV caches in buffers, and runs of rows in them.

A buffer has room for more rows than it holds, so that a new token copies nothing and shapes stay the same. Room grows
in steps. Unused rows are masked, and zero: a value that is not finite would spoil the result even where it is masked.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from threading import Lock
from typing import Any, Protocol

import numpy as np

from sinkprune.contract.errors import BackendError
from sinkprune.contract.manifest import CacheForm, GraphSpec
from sinkprune.contract.precision import Array
from sinkprune.runtime.backends import Cache, Decoder, Engine, Tensor


def row_runs(lengths: Sequence[int], order: Array) -> Iterator[tuple[int, int, int, int]]:
    """Yield the runs of `order` [S] int64, which numbers rows through tensors of these `lengths`.

    A run is rows that are adjacent in their tensor and in the new order: the number of the tensor, their first row in
    it, how many they are, and their first row in the new order.
    """
    starts = [0, *accumulate(lengths)]
    breaks = np.flatnonzero(order[1:] != order[:-1] + 1) + 1
    for place, end in pairwise([0, *breaks.tolist(), len(order)]):
        while place < end:
            row = int(order[place])
            part = bisect_right(starts, row) - 1
            length = min(end - place, starts[part + 1] - row)
            yield part, row - starts[part], length, place
            place += length


def joined(parts: Sequence[Array], order: Array, shape: tuple[int, ...] | None = None) -> Array:
    """Return `Backend.join` of the host arrays `parts`."""
    rows = [part.reshape(-1, part.shape[-1]) for part in parts]
    together = np.empty((1, len(order), rows[0].shape[1]), rows[0].dtype)
    for part, first, count, place in row_runs([len(part) for part in rows], order):
        together[0, place : place + count] = rows[part][first : first + count]
    return together.reshape(shape or together.shape)


ROOM = 64
"""The room of a cache is a multiple of so many rows."""


def room_for(rows: int) -> int:
    """Return the room of a cache that must hold `rows`."""
    return -(-rows // ROOM) * ROOM


def cache_names(spec: GraphSpec) -> dict[str, str]:
    """Return the cache inputs of the decoder segment `spec`, by the outputs with their new content.

    Empty for other graphs, also for an action expert, which reads caches and has no such outputs.
    """
    past = {tensor.name for tensor in spec.inputs}
    names = {tensor.name: f"past_{tensor.name}" for tensor in spec.outputs}
    return {name: own for name, own in names.items() if own in past}


class CacheMemory(Protocol):
    """The memory of a backend for the buffers of caches [1,Hkv,C,h]."""

    fixes_room: bool = False
    """Whether a cache has room for a whole answer at once: captured calls need shapes and addresses that stay."""

    def tensor(self, array: Array) -> Tensor:
        """Return `array` as a tensor on the device."""

    def rows(self, tensor: Tensor) -> int:
        """Return S of `tensor` [1,S,d]; must not wait for the device."""

    def buffers(self, count: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Sequence[Tensor]:
        """Return `count` tensors with any content, whose memory is reused after the last reference to it.

        Raises `BackendError` where memory runs out.
        """

    def copy_rows(self, pairs: Iterable[tuple[Tensor, Tensor]], place: int, rows: int) -> None:
        """Copy, of each pair, the first `rows` rows of [1,Hkv,R,h] to those of [1,Hkv,C,h] from `place` on."""

    def zero_rows(self, targets: Iterable[Tensor], first: int) -> None:
        """Set the rows of each target [1,Hkv,C,h] from `first` on to zero; there may be none."""


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
    return block.nbytes - _ALIGNMENT


class CpuMemory(CacheMemory):
    """Buffers in host memory as OrtValues, which later requests reuse."""

    def __init__(self, onnxruntime: Any) -> None:
        self._ort, self._blocks = onnxruntime, HostBuffers()

    def tensor(self, array: Array) -> Any:
        return self._ort.OrtValue.ortvalue_from_numpy(array)

    def rows(self, tensor: Any) -> int:
        return int(tensor.shape()[1])

    def buffers(self, count: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[Any]:
        # One block for all. The OrtValues keep it alive.
        block = self._blocks.lend(count * prod(shape) * dtype.itemsize)
        return [self.tensor(buffer) for buffer in block.view(dtype).reshape(count, *shape)]

    def copy_rows(self, pairs: Iterable[tuple[Any, Any]], place: int, rows: int) -> None:
        for source, target in pairs:
            target.numpy()[:, :, place : place + rows] = source.numpy()[:, :, :rows]

    def zero_rows(self, targets: Iterable[Any], first: int) -> None:
        for target in targets:
            target.numpy()[:, :, first:] = 0


@dataclass
class BufferedCache(Cache):
    """Keys and values of one segment's layers in buffers."""

    buffers: dict[str, Tensor]
    """Each [1,Hkv,C,h], by the input's name."""
    length: int = 0
    room: int = 0
    """The rows C that the buffers have room for."""
    expected: int = 0
    """The rows that new buffers have room for at least."""


class SegmentCaches:
    """The caches of one decoder segment, of any number of answers."""

    def __init__(self, memory: CacheMemory, spec: GraphSpec, form: CacheForm, room: int | None = None) -> None:
        """Hold the caches of the graph `spec` in `memory`. `room` is the only room that they may have, or None."""
        self._memory, self._in_place, self._room = memory, form == "in-place", room
        self._names = cache_names(spec)
        a_cache = next(tensor for tensor in spec.inputs if tensor.name in self._names.values())
        self._dtype = np.dtype(a_cache.dtype)
        _, self._heads, _, self._size = a_cache.shape
        # All new caches share these, because nothing is written there.
        self._no_buffers = self._new_buffers(0)

    def new_cache(self, expected: int = 0) -> BufferedCache:
        return BufferedCache(self._no_buffers, expected=expected if self._memory.fixes_room else 0)

    def inputs(self, cache: BufferedCache, rows: int) -> dict[str, Tensor]:
        """Return what the graph takes of `cache`, with room for new `rows` if it writes them into the buffers."""
        if self._in_place:
            self._make_room(cache, cache.length + rows)
        return {"past_length": self._memory.tensor(np.array([cache.length], np.int64)), **cache.buffers}

    def append(self, new: Mapping[str, Tensor], cache: BufferedCache, rows: int) -> None:
        """Write the `rows` rows [1,Hkv,S,h] of `new`, by the graph's outputs, behind those of `cache`."""
        self._make_room(cache, cache.length + rows)
        pairs = [(new[output], cache.buffers[name]) for output, name in self._names.items()]
        self._memory.copy_rows(pairs, cache.length, rows)
        cache.length += rows

    def keys_and_values(self, cache: BufferedCache) -> dict[str, Tensor]:
        return dict(cache.buffers)

    def save(self, cache: BufferedCache, rows: int) -> BufferedCache:
        return BufferedCache(self._grown(cache, rows, rows, rows), rows, rows)

    def restore(self, saved: BufferedCache, rows: int, length: int, expected: int = 0) -> BufferedCache:
        room = self._room or room_for(max(length, expected if self._memory.fixes_room else 0))
        return BufferedCache(self._grown(saved, room, rows, rows), rows, room)

    def _grown(self, cache: BufferedCache, room: int, rows: int, used: int) -> dict[str, Tensor]:
        """Return buffers of this `room` with the first `rows` rows of `cache`; those from `used` on are zero."""
        buffers = self._new_buffers(room)
        if rows:
            self._memory.copy_rows([(cache.buffers[name], buffer) for name, buffer in buffers.items()], 0, rows)
        self._memory.zero_rows(buffers.values(), used)
        return buffers

    def _make_room(self, cache: BufferedCache, rows: int) -> None:
        """Grow `cache` to have room for `rows`; rows after these are zero in new buffers."""
        if rows <= cache.room:
            return
        room = self._room or room_for(max(rows, cache.expected))
        if rows > room:
            raise BackendError(
                f"{rows} rows are more than the {room} that the engine's caches have room for. Build engines that "
                "have more, by a larger --max-prompt or --max-new-tokens of sinkprune-build."
            )
        cache.buffers, cache.room = self._grown(cache, room, cache.length, rows), room

    def _new_buffers(self, room: int) -> dict[str, Tensor]:
        buffers = self._memory.buffers(len(self._names), (1, self._heads, room, self._size), self._dtype)
        return dict(zip(self._names.values(), buffers, strict=True))


class BufferedDecoder(SegmentCaches, Decoder):
    """A decoder segment whose engine takes all inputs of the graph contract, with the caches as buffers.

    With caches of form `in-place`, the engine writes new rows into the buffers. With the form `rows`, it returns new
    rows, which are then written into the buffers.
    """

    def __init__(
        self, engine: Engine, memory: CacheMemory, spec: GraphSpec, form: CacheForm, room: int | None = None
    ) -> None:
        """Run the graph `spec` on `engine`; the rest is that of `SegmentCaches`."""
        super().__init__(memory, spec, form, room)
        self._engine = engine

    def __call__(self, inputs: Mapping[str, Tensor], cache: BufferedCache) -> dict[str, Tensor]:
        rows = self._memory.rows(inputs["hidden"])
        outputs = self._engine({**inputs, **self.inputs(cache, rows)})
        if self._in_place:
            cache.length += rows
        else:
            # After the run, because new room may hold values that are not finite until the rows are written.
            self.append(outputs, cache, rows)
        return outputs
