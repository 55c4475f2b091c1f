"""A CUDA device by pycuda, which many JetPack 6 images carry: no CUDA graphs, everything runs eagerly.

Not run yet: pycuda builds on the board, with its nvcc, and cannot be installed on the development machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sinkprune.contract.errors import BackendError
from sinkprune.contract.precision import Array
from sinkprune.runtime.device import Address, Device, free_bytes, out_of_memory

T = TypeVar("T")


class PycudaDevice(Device):
    """The first CUDA device, in the primary context that TensorRT uses too. All calls must come from one thread."""

    has_graphs = False

    def __init__(self) -> None:
        """Open the first device; raises `BackendError` if pycuda, a driver or a GPU is missing."""
        self._cuda = _import_driver()
        self._do(self._cuda.init)
        device = self._do(self._cuda.Device, 0)
        self._context = device.retain_primary_context()
        self._context.push()
        self.name = device.name()
        major, minor = device.compute_capability()
        self.compute_capability = 10 * major + minor
        self._integrated = bool(device.get_attribute(self._cuda.device_attribute.INTEGRATED))
        # Streams of pycuda wait for the default stream, on which nothing of ours runs.
        self._stream = self._cuda.Stream()
        self.stream = int(self._stream.handle)
        self._allocations: dict[Address, Any] = {}
        self._staging: list[tuple[Any, Any]] = []

    def memory(self) -> tuple[int, int]:
        free, total = self._do(self._cuda.mem_get_info)
        return free_bytes(free, integrated=self._integrated), total

    def allocate(self, size: int) -> Address:
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
