"""A decoder segment on an engine that is given its caches as buffers, and what backends must do with such buffers.

A buffer has room for more rows than it holds, so that no token moves what is there and shapes stay as they are. Room
is taken in steps; rows that hold nothing yet are seen by nobody, and zero, because what is not finite would show.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from sinkprune.contract.engines_manifest import OptimisationProfiles
from sinkprune.contract.errors import BackendError
from sinkprune.contract.manifest import CacheForm, GraphSpec
from sinkprune.contract.precision import Array
from sinkprune.runtime.backends import Cache, Decoder, Engine, Tensor

ROOM = 64
"""Rows: how many rows a cache has room for is a multiple of it."""


def room_for(rows: int) -> int:
    """How many rows a cache has room for that must hold `rows`."""
    return -(-rows // ROOM) * ROOM


def cache_names(spec: GraphSpec) -> dict[str, str]:
    """The caches among the inputs of the decoder segment `spec`, by the outputs that stand for them."""
    prefix = "past_"
    names = (tensor.name.removeprefix(prefix) for tensor in spec.inputs if tensor.name.startswith(prefix))
    return {name: prefix + name for name in names if name != "length"}


def fixed_room(spec: GraphSpec, profiles: OptimisationProfiles) -> int | None:
    """The one room that an engine of the decoder segment `spec` takes caches of; None where it takes others too.

    TensorRT updates caches of one size in place, and of no range of sizes.
    """
    rooms = {
        shape[2]
        for ranges in profiles.values()
        for name in cache_names(spec).values()
        for shape in (ranges[name].min, ranges[name].max)
    }
    return rooms.pop() if len(rooms) == 1 else None


class CacheMemory(Protocol):
    """Where a backend keeps the buffers of caches: [1,Hkv,C,h], each with the rows of all heads."""

    def tensor(self, array: Array) -> Tensor:
        """`array` as a tensor on the device."""

    def rows(self, tensor: Tensor) -> int:
        """The length of axis 1 of `tensor` [1,S,d]; must not wait for the device."""

    def buffer(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        """A tensor that may hold anything; its memory is another's when nobody holds it any more.

        Raises `BackendError` where there is no memory for it.
        """

    def copy_rows(self, source: Tensor, target: Tensor, place: int) -> None:
        """Copy all rows of `source` [1,Hkv,R,h] to the rows of `target` [1,Hkv,C,h] from `place` on."""

    def zero_rows(self, target: Tensor, first: int) -> None:
        """Make the rows of `target` [1,Hkv,C,h] from `first` on zero; there may be none."""


@dataclass
class BufferedCache(Cache):
    """Keys and values of one segment's layers in buffers."""

    buffers: dict[str, Tensor]
    """Each [1,Hkv,C,h], by the input's name."""
    length: int = 0
    room: int = 0
    """The rows C that the buffers have room for."""


class BufferedDecoder(Decoder):
    """A decoder segment whose engine is given all inputs of the graph contract, its caches among them."""

    def __init__(self, engine: Engine, memory: CacheMemory, spec: GraphSpec, room: int | None = None) -> None:
        """`engine` runs the graph `spec`. `room` is the only one its caches may have; None where any will do."""
        self._engine, self._memory, self._room = engine, memory, room
        self._names = cache_names(spec)
        a_cache = next(tensor for tensor in spec.inputs if tensor.name in self._names.values())
        self._dtype = np.dtype(a_cache.dtype)
        _, self._heads, _, self._size = a_cache.shape

    def new_cache(self) -> BufferedCache:
        return BufferedCache(self._new_buffers(0))

    @abstractmethod
    def __call__(self, inputs: Mapping[str, Tensor], cache: BufferedCache) -> dict[str, Tensor]: ...

    def _run(self, inputs: Mapping[str, Tensor], cache: BufferedCache) -> dict[str, Tensor]:
        length = self._memory.tensor(np.array([cache.length], np.int64))
        return self._engine({**inputs, "past_length": length, **cache.buffers})

    def _make_room(self, cache: BufferedCache, rows: int) -> None:
        """Have room for `rows`; those behind them are zero where new room was taken."""
        if rows <= cache.room:
            return
        room = self._room or room_for(rows)
        if rows > room:
            raise BackendError(
                f"{rows} rows are more than the {room} that the engine's caches have room for. Build engines that "
                "have more, by a larger --max-prompt or --max-new-tokens of sinkprune-build."
            )
        buffers = self._new_buffers(room)
        for name, buffer in buffers.items():
            if cache.length:
                self._memory.copy_rows(cache.buffers[name], buffer, 0)
            self._memory.zero_rows(buffer, rows)
        cache.buffers, cache.room = buffers, room

    def _new_buffers(self, room: int) -> dict[str, Tensor]:
        shape = (1, self._heads, room, self._size)
        return {name: self._memory.buffer(shape, self._dtype) for name in self._names.values()}


class InPlaceDecoder(BufferedDecoder):
    """Of form `in-place`: the engine writes new rows into the buffers it is given."""

    def __call__(self, inputs: Mapping[str, Tensor], cache: BufferedCache) -> dict[str, Tensor]:
        length = cache.length + self._memory.rows(inputs["hidden"])
        self._make_room(cache, length)
        outputs = self._run(inputs, cache)
        cache.length = length
        return outputs


class RowsDecoder(BufferedDecoder):
    """Of form `rows`: the engine gives new rows, which are written into the buffers when it is done."""

    def __call__(self, inputs: Mapping[str, Tensor], cache: BufferedCache) -> dict[str, Tensor]:
        length = cache.length + self._memory.rows(inputs["hidden"])
        outputs = self._run(inputs, cache)
        # Not before: rows that were taken and not written yet would not be finite.
        self._make_room(cache, length)
        for output, name in self._names.items():
            self._memory.copy_rows(outputs[output], cache.buffers[name], cache.length)
        cache.length = length
        return outputs


DECODERS: dict[CacheForm, type[BufferedDecoder]] = {"in-place": InPlaceDecoder, "rows": RowsDecoder}
"""The decoder of each form of cache."""
