"""One interface to a CUDA device: its memory, one stream, and CUDA graphs if the library has them.

`cuda-python` is the default. `pycuda`, which many JetPack 6 images carry, has no graphs and runs everything eagerly.
Both share the device's primary context with TensorRT. Kernels are launched by `engines/plugins/launches.py`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Protocol

from sinkprune.contract.errors import BackendError
from sinkprune.contract.memory import available_bytes
from sinkprune.contract.precision import Array

Address = int
"""A device address in bytes."""


class Device(Protocol):
    """One GPU with one stream. Every copy and replay is enqueued on this stream, in order."""

    name: str
    """The name that the driver gives the GPU."""
    compute_capability: int
    """The GPU's compute capability without a point: 87 for sm_87."""
    stream: int
    """The CUstream handle, as TensorRT takes it."""
    has_graphs: bool
    """Whether the library can capture CUDA graphs, so that `begin_capture` and the methods after it may be called."""

    def memory(self) -> tuple[int, int]:
        """Return the free and total bytes of the device's memory.

        On a board that shares its memory with the CPU, the free bytes include what the system can reclaim.
        """

    def allocate(self, size: int) -> Address:
        """Return the address of `size` new bytes. Raises `BackendError` with needed and free bytes."""

    def free(self, address: Address) -> None:
        """Free memory of `allocate`, after all work enqueued before."""

    def copy_in(self, address: Address, array: Array) -> None:
        """Enqueue a copy of a C-contiguous host array to the device. The array may be changed at once."""

    def copy_out(self, array: Array, address: Address) -> None:
        """Fill a C-contiguous host array from the device, and wait for it and all work enqueued before."""

    def copy(self, destination: Address, source: Address, size: int) -> None:
        """Enqueue a copy of `size` bytes, at least one, within the device's memory."""

    def copy_lines(
        self, destination: Address, pitch: int, source: Address, source_pitch: int, size: int, lines: int
    ) -> None:
        """Enqueue a copy of `lines` lines of `size` bytes, at least one of each, within the device's memory.

        Lines start `pitch` bytes apart in the destination, and `source_pitch` bytes apart in the source.
        """

    def zero_lines(self, destination: Address, pitch: int, size: int, lines: int) -> None:
        """Enqueue zeros for `lines` lines of `size` bytes, at least one of each, that start `pitch` bytes apart."""

    def synchronize(self) -> None:
        """Wait for all work enqueued before."""

    def record_event(self) -> Any:
        """Return a mark after all work enqueued before, for `elapsed_ms`."""

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Return the milliseconds on the device between two marks of `record_event`, after waiting for `end`."""

    def begin_capture(self) -> None:
        """Record what is enqueued from here on, in place of running it. Only if `has_graphs`."""
        raise RuntimeError("begin_capture needs has_graphs")

    def end_capture(self) -> Any:
        """Return the CUDA graph of the work enqueued since `begin_capture`, for `replay`."""
        raise RuntimeError("end_capture needs has_graphs")

    def replay(self, graph: Any) -> None:
        """Enqueue a CUDA graph of `end_capture`: the same work at the same addresses."""
        raise RuntimeError("replay needs has_graphs")


def out_of_memory(device: Device, size: int) -> BackendError:
    """Return the error for a device without `size` free bytes."""
    free, total = device.memory()
    return BackendError(
        f"out of memory on {device.name}: {size / 1e6:.1f} MB are needed, {free / 1e6:.1f} of {total / 1e6:.1f} MB "
        "are free. End other programs, or use a smaller budget or shorter answers."
    )


def free_bytes(free: int, *, integrated: bool) -> int:
    """Return the bytes that programs can use of a device with `free` bytes; `integrated` shares the CPU's memory."""
    # CUDA counts the page cache of files just read as used, but the system reclaims it.
    return max(free, available_bytes()) if integrated else free


def open_device() -> Device:
    """Return the first CUDA device (`CUDA_VISIBLE_DEVICES` chooses), by cuda-python or, if it is missing, by pycuda.

    Raises `BackendError` if neither is installed, or if there is no driver or no GPU.
    """
    if find_spec("cuda") and find_spec("cuda.bindings"):
        from sinkprune.runtime.device.cuda import CudaPythonDevice

        return CudaPythonDevice()
    if find_spec("pycuda"):
        from sinkprune.runtime.device.cuda import PycudaDevice

        return PycudaDevice()
    raise BackendError(
        "a CUDA device needs cuda-python or pycuda, and neither is installed. Install one with: pip install "
        "cuda-python"
    )
