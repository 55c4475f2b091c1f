"""A CUDA device by pycuda, which many JetPack 6 images carry: no CUDA graphs, everything runs eagerly.

Never run: pycuda builds on the board, with its nvcc, and could not be installed where this was written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from sinkprune.contract.errors import BackendError
from sinkprune.contract.precision import Array
from sinkprune.contract.system.system_memory import available_bytes
from sinkprune.runtime.device import Address, Device, out_of_memory

T = TypeVar("T")


class PycudaDevice(Device):
    """The first CUDA device; its primary context is the one TensorRT uses too. Calls must come from one thread."""

    has_graphs = False

    def __init__(self) -> None:
        """Open the first device; raises `BackendError` if pycuda, a driver or a GPU is missing."""
        self._cuda = _import_driver()
        device = self._do(self._start)
        self._context = device.retain_primary_context()
        self._context.push()
        self.name = device.name()
        major, minor = device.compute_capability()
        self.compute_capability = 10 * major + minor
        self._integrated = bool(device.get_attribute(self._cuda.device_attribute.INTEGRATED))
        # pycuda makes streams that wait for the default stream; nothing of ours runs there.
        self._stream = self._cuda.Stream()
        self.stream = int(self._stream.handle)
        self._allocations: dict[Address, Any] = {}
        self._staging: list[tuple[Any, Any]] = []

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the device's memory.

        On a board that shares its memory with the CPU, free is what the system can make free.
        """
        free, total = self._do(self._cuda.mem_get_info)
        # What was just read from disk counts as used there, though it is only cached.
        return (max(free, available_bytes()) if self._integrated else free), total

    def allocate(self, size: int) -> Address:
        """The address of `size` new bytes; raises `BackendError`, which tells need and free."""
        try:
            allocation = self._cuda.mem_alloc(size)
        except self._cuda.MemoryError as error:
            raise out_of_memory(self, size) from error
        address = int(allocation)
        self._allocations[address] = allocation
        return address

    def free(self, address: Address) -> None:
        self._allocations.pop(address).free()

    def copy_in(self, address: Address, array: Array) -> None:
        if not array.nbytes:
            return
        # Pinned memory lives until its copy is done.
        self._staging = [(memory, copied) for memory, copied in self._staging if not copied.query()]
        staging = self._do(self._cuda.pagelocked_empty, array.shape, array.dtype)
        staging[...] = array
        self._do(self._cuda.memcpy_htod_async, address, staging, self._stream)
        self._staging.append((staging, self._cuda.Event().record(self._stream)))

    def copy_out(self, array: Array, address: Address) -> None:
        if array.nbytes:
            self._do(self._cuda.memcpy_dtoh_async, array, address, self._stream)
        self.synchronize()

    def copy(self, destination: Address, source: Address, size: int) -> None:
        self._do(self._cuda.memcpy_dtod_async, destination, source, size, self._stream)

    def copy_lines(
        self, destination: Address, pitch: int, source: Address, source_pitch: int, size: int, lines: int
    ) -> None:
        copy = self._do(self._cuda.Memcpy2D)
        copy.set_src_device(source)
        copy.set_dst_device(destination)
        copy.src_pitch, copy.dst_pitch = source_pitch, pitch
        copy.width_in_bytes, copy.height = size, lines
        self._do(copy, self._stream)

    def zero_lines(self, destination: Address, pitch: int, size: int, lines: int) -> None:
        self._do(self._cuda.memset_d2d8_async, destination, pitch, 0, size, lines, self._stream)

    def synchronize(self) -> None:
        self._do(self._stream.synchronize)

    def record_event(self) -> Any:
        return self._cuda.Event().record(self._stream)

    def elapsed_ms(self, start: Any, end: Any) -> float:
        self._do(end.synchronize)
        return float(end.time_since(start))

    def load_kernel(self, image: bytes, name: str) -> Any:
        return self._do(self._cuda.module_from_buffer, image + b"\0").get_function(name)

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        arguments: Sequence[np.uint64 | np.int32],
    ) -> None:
        if shared_bytes > 48 << 10:
            # More than a kernel gets unasked.
            kernel.set_attribute(self._cuda.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
        kernel(*arguments, block=(threads, 1, 1), grid=grid, shared=shared_bytes, stream=self._stream)

    def begin_capture(self) -> None:
        raise NotImplementedError("pycuda has no CUDA graphs; has_graphs says so")

    def end_capture(self) -> Any:
        raise NotImplementedError("pycuda has no CUDA graphs; has_graphs says so")

    def replay(self, graph: Any) -> None:
        raise NotImplementedError("pycuda has no CUDA graphs; has_graphs says so")

    def _start(self) -> Any:
        self._cuda.init()
        return self._cuda.Device(0)

    def _do(self, function: Callable[..., T], *arguments: Any) -> T:
        try:
            return function(*arguments)
        except self._cuda.Error as error:
            raise BackendError(f"CUDA refused: {error}. After such an error, start the program again.") from error


def _import_driver() -> Any:
    try:
        from pycuda import driver
    except ImportError as error:
        raise BackendError(f"pycuda cannot be imported ({error}). Install cuda-python, or pycuda again.") from error
    return driver
