"""A CUDA device behind one small interface: memory, one stream, kernels, and graphs where the library has them.

`cuda-python` is the default; `pycuda`, which many JetPack 6 images carry, has no graphs and runs everything eagerly.
Both share the device's primary context with TensorRT.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np

from sinkprune.contract.errors import BackendError
from sinkprune.contract.precision import Array

Address = int
"""A device address in bytes."""


class Device(Protocol):
    """One GPU with one stream; every copy, launch and replay is enqueued on it, in order."""

    name: str
    """The GPU's name, as its driver tells it."""
    compute_capability: int
    """The GPU's, without a point: 87 for sm_87."""
    stream: int
    """The CUstream handle, as TensorRT takes it."""
    has_graphs: bool
    """Whether the library can capture CUDA graphs; without, `begin_capture` and its like must not be called."""

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the device's memory.

        On a board that shares its memory with the CPU, free is what the system can make free.
        """

    def allocate(self, size: int) -> Address:
        """The address of `size` new bytes; raises `BackendError`, which tells need and free."""

    def free(self, address: Address) -> None:
        """Give back the memory that `allocate` gave at `address`; waits for all work enqueued before."""

    def copy_in(self, address: Address, array: Array) -> None:
        """Enqueue a copy of a C-contiguous host array to the device; the array may be reused at once."""

    def copy_out(self, array: Array, address: Address) -> None:
        """Fill a C-contiguous host array from the device, after all that was enqueued before."""

    def copy(self, destination: Address, source: Address, size: int) -> None:
        """Enqueue a copy of `size` bytes, at least one, within the device's memory."""

    def copy_lines(
        self, destination: Address, pitch: int, source: Address, source_pitch: int, size: int, lines: int
    ) -> None:
        """Enqueue a copy of `lines` lines of `size` bytes, at least one of each, within the device's memory.

        A line starts `pitch` bytes behind the one before in the destination, `source_pitch` in the source.
        """

    def zero_lines(self, destination: Address, pitch: int, size: int, lines: int) -> None:
        """Enqueue zeros for `lines` lines of `size` bytes, at least one of each, that start `pitch` bytes apart."""

    def synchronize(self) -> None:
        """Wait until the stream has done all it was given."""

    def record_event(self) -> Any:
        """A mark behind all work enqueued so far; `elapsed_ms` tells the time on the device between two."""

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds on the device between two marks of `record_event`; waits for the second."""

    def load_kernel(self, image: bytes, name: str) -> Any:
        """The kernel `name` of `image`, a cubin or PTX, for `launch`; raises `BackendError` if refused."""

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        arguments: Sequence[np.uint64 | np.int32],
    ) -> None:
        """Enqueue a kernel of `load_kernel` on `grid` blocks of `threads` threads.

        A block has `shared_bytes` of dynamic shared memory. Of the arguments, addresses are uint64, integers int32.
        """

    def begin_capture(self) -> None:
        """From here on what is enqueued is recorded, not run; only where `has_graphs`."""

    def end_capture(self) -> Any:
        """The CUDA graph of what was enqueued since `begin_capture`, for `replay`."""

    def replay(self, graph: Any) -> None:
        """Enqueue a CUDA graph of `end_capture`: the same work at the same addresses."""


def out_of_memory(device: Device, size: int) -> BackendError:
    """What to say of a device that has no `size` bytes left."""
    free, total = device.memory()
    return BackendError(
        f"out of memory on {device.name}: {size / 1e6:.1f} MB are needed, {free / 1e6:.1f} of {total / 1e6:.1f} MB "
        "are free. End other programs, or use a smaller budget or shorter answers."
    )


def open_device() -> Device:
    """The first CUDA device (`CUDA_VISIBLE_DEVICES` chooses), by cuda-python, or by pycuda if only that is installed.

    Raises `BackendError` if neither is installed, or if there is no driver or no GPU.
    """
    if find_spec("cuda") and find_spec("cuda.bindings"):
        from sinkprune.runtime.device.cuda_python import CudaPythonDevice

        return CudaPythonDevice()
    if find_spec("pycuda"):
        from sinkprune.runtime.device.pycuda_device import PycudaDevice

        return PycudaDevice()
    raise BackendError(
        "a CUDA device is driven by cuda-python or pycuda, and neither is installed. "
        "Install one with: pip install cuda-python"
    )
