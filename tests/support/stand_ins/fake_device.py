"""A recording fake of `Device` on host memory, for machines without a GPU: memory and a stream.

Like a stream, it runs nothing before the host waits for it: work that relies on a host array that has changed since,
or on memory that was given out too early, gives other numbers here too.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from sinkprune.contract.errors import BackendError

# NaN as a float of any size, and no size or index as a number
GARBAGE = 0xFF
_ALIGNMENT = 256


class FakeEvent:
    """A mark in the stream."""

    seconds: float | None = None

    def happen(self) -> None:
        self.seconds = time.perf_counter()


class FakeDevice:
    """A device whose memory is the host's. Every call is recorded by its name in `calls`."""

    name = "FakeDevice"
    stream = 77

    def __init__(self, *, has_graphs: bool = True, compute_capability: int = 86, total: int = 1 << 30) -> None:
        self.has_graphs, self.compute_capability, self.total = has_graphs, compute_capability, total
        self.calls: list[str] = []
        self.reads: list[tuple[int, ...]] = []
        """The shapes of what the host has read."""
        self.allocations: dict[int, np.ndarray[Any, Any]] = {}
        self._queue: list[Callable[[], object]] = []
        self._recorded: list[Callable[[], object]] | None = None

    @property
    def capturing(self) -> bool:
        return self._recorded is not None

    def enqueue(self, work: Callable[[], object]) -> None:
        """What the fake of an engine library does on this device's stream."""
        (self._queue if self._recorded is None else self._recorded).append(work)

    def memory(self) -> tuple[int, int]:
        return self.total - sum(len(memory) - _ALIGNMENT for memory in self.allocations.values()), self.total

    def allocate(self, size: int) -> int:
        self.calls.append("allocate")
        free, total = self.memory()
        if size > free:
            raise BackendError(f"out of memory: {size} bytes are needed, {free} of {total} are free.")
        memory = np.full(size + _ALIGNMENT, GARBAGE, np.uint8)
        address = -(-memory.ctypes.data // _ALIGNMENT) * _ALIGNMENT
        self.allocations[address] = memory
        return address

    def free(self, address: int) -> None:
        self.calls.append("free")
        assert not self._queue, "memory was freed while work that may use it was still to be done"
        del self.allocations[address]

    def copy_in(self, address: int, array: np.ndarray[Any, Any]) -> None:
        self.calls.append("copy_in")
        self.enqueue(partial(ctypes.memmove, address, array.tobytes(), array.nbytes))

    def copy_out(self, array: np.ndarray[Any, Any], address: int) -> None:
        self.calls.append("copy_out")
        self.reads.append(array.shape)
        self.flush()
        ctypes.memmove(array.ctypes.data, address, array.nbytes)

    def copy(self, destination: int, source: int, size: int) -> None:
        self.calls.append("copy")
        self.enqueue(partial(ctypes.memmove, destination, source, size))

    def copy_lines(self, destination: int, pitch: int, source: int, source_pitch: int, size: int, lines: int) -> None:
        self.calls.append("copy_lines")
        for line in range(lines):
            self.enqueue(partial(ctypes.memmove, destination + line * pitch, source + line * source_pitch, size))

    def zero_lines(self, destination: int, pitch: int, size: int, lines: int) -> None:
        self.calls.append("zero_lines")
        for line in range(lines):
            self.enqueue(partial(ctypes.memset, destination + line * pitch, 0, size))

    def synchronize(self) -> None:
        self.calls.append("synchronize")
        self.flush()

    def record_event(self) -> FakeEvent:
        self.calls.append("record_event")
        event = FakeEvent()
        self.enqueue(event.happen)
        return event

    def elapsed_ms(self, start: FakeEvent, end: FakeEvent) -> float:
        self.calls.append("elapsed_ms")
        self.flush()
        assert start.seconds is not None and end.seconds is not None
        return (end.seconds - start.seconds) * 1e3

    def begin_capture(self) -> None:
        self.calls.append("begin_capture")
        assert self.has_graphs and self._recorded is None
        self._recorded = []

    def end_capture(self) -> list[Callable[[], object]]:
        self.calls.append("end_capture")
        if self._recorded is None:
            raise BackendError("CUDA refused: nothing is being captured.")
        graph, self._recorded = self._recorded, None
        return graph

    def replay(self, graph: list[Callable[[], object]]) -> None:
        self.calls.append("replay")
        self._queue.extend(graph)

    def flush(self) -> None:
        """Do all work that is enqueued."""
        assert not self.capturing, "the host waits while a graph is being captured"
        queue, self._queue = self._queue, []
        for work in queue:
            work()
