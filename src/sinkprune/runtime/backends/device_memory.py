"""Tensors in a device's memory, and the operations of a backend that are copies on its stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Any

import numpy as np

from sinkprune.contract.precision import Array
from sinkprune.contract.report import CaptureReport
from sinkprune.runtime.backends import Engine
from sinkprune.runtime.backends.kv_cache import CacheMemory, row_runs
from sinkprune.runtime.backends.small_graphs import BEST, NOT_FINITE
from sinkprune.runtime.device.captures import Captures
from sinkprune.runtime.device.cuda import Address, Block, Device, MemoryPool
from sinkprune.runtime.device.dlpack import DevicePixels, read_pixels

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]


class DeviceTensor:
    """A tensor in device memory; its memory returns to the pool with the last reference to it."""

    __slots__ = ("block", "dtype", "shape")

    def __init__(self, block: Block | DevicePixels, shape: Shape, dtype: np.dtype[Any]) -> None:
        self.block, self.shape, self.dtype = block, shape, dtype

    @property
    def address(self) -> Address:
        """The device address of the tensor's first element."""
        return self.block.address

    @property
    def nbytes(self) -> int:
        """The bytes of the elements."""
        return prod(self.shape) * self.dtype.itemsize


class DeviceMemory(CacheMemory):
    """The part of a backend that needs no engine library: its tensors are `DeviceTensor`.

    All work is enqueued on the device's only stream. Only `numpy` and `elapsed_ms` wait for the device.
    """

    turn: AbstractContextManager[Any]
    enqueues = True

    def __init__(self, device: Device, captures: Captures) -> None:
        self.gpu, self.captures = device, captures
        self.pool = MemoryPool(device)

    def captured(self) -> CaptureReport:
        return self.captures.report()

    @property
    def fixes_room(self) -> bool:  # type: ignore[override]
        return self.gpu.has_graphs

    def empty(self, shape: Shape, dtype: np.dtype[Any]) -> DeviceTensor:
        """Return a tensor with any content."""
        return DeviceTensor(self.pool.allocate(prod(shape) * dtype.itemsize), shape, dtype)

    def tensor(self, array: Array) -> DeviceTensor:
        array = np.ascontiguousarray(array)
        tensor = self.empty(array.shape, array.dtype)
        self.gpu.copy_in(tensor.address, array)
        return tensor

    def borrow(self, frame: Any) -> DeviceTensor:
        pixels = read_pixels(frame, self.gpu.stream)
        return DeviceTensor(pixels, pixels.shape, np.dtype(np.uint8))

    def stack(self, parts: Sequence[DeviceTensor]) -> DeviceTensor:
        """Return `parts` joined along their first axis, copied on the device."""
        stacked = self.empty((sum(part.shape[0] for part in parts), *parts[0].shape[1:]), parts[0].dtype)
        place = stacked.address
        for part in parts:
            self.gpu.copy(place, part.address, part.nbytes)
            place += part.nbytes
        return stacked

    def numpy(self, tensor: DeviceTensor) -> Array:
        """Return `tensor` as a host array; waits until all work enqueued so far is done."""
        array = np.empty(tensor.shape, tensor.dtype)
        self.gpu.copy_out(array, tensor.address)
        return array

    def join(self, parts: Sequence[DeviceTensor], order: Array, shape: Shape | None = None) -> DeviceTensor:
        """Return rows of `parts` in `order`, copied on the device, run by run."""
        width, dtype = parts[0].shape[-1], parts[0].dtype
        row = width * dtype.itemsize
        joined = self.empty(shape or (1, len(order), width), dtype)
        for part, first, count, place in row_runs([prod(part.shape[:-1]) for part in parts], order):
            self.gpu.copy(joined.address + place * row, parts[part].address + first * row, count * row)
        return joined

    def split(self, tensor: DeviceTensor) -> list[DeviceTensor]:
        """Return the parts [1,...] of `tensor` [G,...], copied on the device."""
        parts = [self.empty((1, *tensor.shape[1:]), tensor.dtype) for _ in range(tensor.shape[0])]
        # Copies, because kernels need addresses that are aligned.
        for number, part in enumerate(parts):
            self.gpu.copy(part.address, tensor.address + number * part.nbytes, part.nbytes)
        return parts

    def rows(self, tensor: DeviceTensor) -> int:
        return tensor.shape[1]

    def buffers(self, count: int, shape: Shape, dtype: np.dtype[Any]) -> list[DeviceTensor]:
        return [self.empty(shape, dtype) for _ in range(count)]

    def copy_rows(self, pairs: Iterable[tuple[DeviceTensor, DeviceTensor]], place: int, rows: int) -> None:
        for source, target in pairs:
            _, heads, given, size = source.shape
            row, room = size * source.dtype.itemsize, target.shape[2]
            self.gpu.copy_lines(
                target.address + place * row, room * row, source.address, given * row, rows * row, heads
            )

    def zero_rows(self, targets: Iterable[DeviceTensor], first: int) -> None:
        for target in targets:
            _, heads, room, size = target.shape
            row = size * target.dtype.itemsize
            if first < room:
                self.gpu.zero_lines(target.address + first * row, room * row, (room - first) * row, heads)

    def small(self, name: str, *kind: Any) -> Engine:
        raise NotImplementedError

    def best(self, logits: DeviceTensor) -> tuple[int, bool]:
        """Return what `Backend.best` does; two numbers cross from the device."""
        engine = self.small(BEST, logits.dtype.name, logits.shape[1])
        index, not_finite = self.numpy(engine({"logits": logits})["best"])[0]
        return int(index), not not_finite

    def not_finite(self, tensor: DeviceTensor) -> DeviceTensor:
        values = DeviceTensor(tensor.block, (prod(tensor.shape),), tensor.dtype)
        counted: DeviceTensor = self.small(NOT_FINITE, tensor.dtype.name)({"values": values})["count"]
        return counted

    def mark(self) -> Any:
        # While another thread captures a graph, the event would be captured too, and a wait would end the capture.
        with self.turn:
            return self.gpu.record_event()

    def elapsed_ms(self, start: Any, end: Any) -> float:
        with self.turn:
            return self.gpu.elapsed_ms(start, end)
