"""A CUDA device: its memory, one stream, and CUDA graphs if the library has them.

`cuda-python` is the default. `pycuda`, which many JetPack 6 images carry, has no graphs and runs everything eagerly.
Both share the device's primary context with TensorRT. Kernels are launched by `engines/plugins/launches.py`.

All work runs on one stream, in order. So a block may be reused while earlier work on it is still enqueued: later
writes run after earlier reads. Source: CUDA Driver API. Neither class has run on a GPU yet.
"""

from __future__ import annotations

import ctypes
import heapq
import weakref
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol, TypeVar

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
        return CudaPythonDevice()
    if find_spec("pycuda"):
        return PycudaDevice()
    raise BackendError(
        "a CUDA device needs cuda-python or pycuda, and neither is installed. Install one with: pip install "
        "cuda-python"
    )


def _import_driver(library: str, module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise BackendError(
            f"{library} cannot be imported ({error}). Install cuda-python with: pip install cuda-python"
        ) from error


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


T = TypeVar("T")


class PycudaDevice(Device):
    """The first CUDA device, in the primary context that TensorRT uses too. All calls must come from one thread."""

    has_graphs = False

    def __init__(self) -> None:
        """Open the first device; raises `BackendError` if pycuda, a driver or a GPU is missing."""
        self._cuda = _import_driver("pycuda", "pycuda.driver")
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


class CudaPythonDevice(Device):
    """The first CUDA device, in the primary context that TensorRT uses too. Calls may come from any thread."""

    has_graphs = True

    def __init__(self) -> None:
        """Open the first device; raises `BackendError` if cuda-python, a driver or a GPU is missing."""
        self._cuda = cuda = _import_driver("cuda-python", "cuda.bindings.driver")
        try:
            (status,) = cuda.cuInit(0)
        except RuntimeError as error:
            # The bindings load libcuda at their first call, and raise an error of their own.
            raise BackendError(f"no NVIDIA driver is installed here: libcuda is not found. {_NEEDS_GPU}") from error
        if status != cuda.CUresult.CUDA_SUCCESS:
            raise BackendError(f"CUDA does not start: {self._reason(status)}. {_NEEDS_GPU}")
        number = self._checked(cuda.cuDeviceGet(0))
        self._context = self._checked(cuda.cuDevicePrimaryCtxRetain(number))
        name = self._do(cuda.cuDeviceGetName, 256, number)
        self.name = name.split(b"\0")[0].decode()
        attribute = cuda.CUdevice_attribute
        major, minor, integrated = (
            self._do(cuda.cuDeviceGetAttribute, which, number)
            for which in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED,
            )
        )
        self.compute_capability = 10 * major + minor
        self._integrated = bool(integrated)
        # On the default stream TensorRT synchronises needlessly, and a capture is not allowed.
        self._stream = self._do(cuda.cuStreamCreate, cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.stream = int(self._stream)
        self._staging: list[_Staging] = []

    def memory(self) -> tuple[int, int]:
        free, total = self._do(self._cuda.cuMemGetInfo)
        return free_bytes(free, integrated=self._integrated), total

    def allocate(self, size: int) -> Address:
        self._enter()
        # Not cuMemAllocAsync: Tegra boards may lack memory pools.
        status, address = self._cuda.cuMemAlloc(size)
        if status == self._cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise out_of_memory(self, size)
        self._checked((status,))
        return int(address)

    def free(self, address: Address) -> None:
        self._do(self._cuda.cuMemFree, address)

    def copy_in(self, address: Address, array: Array) -> None:
        if not array.nbytes:
            return
        staging = self._free_staging(array.nbytes)
        ctypes.memmove(staging.address, array.ctypes.data, array.nbytes)
        self._do(self._cuda.cuMemcpyHtoDAsync, address, staging.address, array.nbytes, self._stream)
        self._do(self._cuda.cuEventRecord, staging.copied, self._stream)

    def copy_out(self, array: Array, address: Address) -> None:
        if array.nbytes:
            self._do(self._cuda.cuMemcpyDtoHAsync, array.ctypes.data, address, array.nbytes, self._stream)
        self.synchronize()

    def copy(self, destination: Address, source: Address, size: int) -> None:
        self._do(self._cuda.cuMemcpyDtoDAsync, destination, source, size, self._stream)

    def copy_lines(
        self, destination: Address, pitch: int, source: Address, source_pitch: int, size: int, lines: int
    ) -> None:
        copy, on_device = self._cuda.CUDA_MEMCPY2D(), self._cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.srcMemoryType = copy.dstMemoryType = on_device
        copy.srcDevice, copy.srcPitch = source, source_pitch
        copy.dstDevice, copy.dstPitch = destination, pitch
        copy.WidthInBytes, copy.Height = size, lines
        self._do(self._cuda.cuMemcpy2DAsync, copy, self._stream)

    def zero_lines(self, destination: Address, pitch: int, size: int, lines: int) -> None:
        self._do(self._cuda.cuMemsetD2D8Async, destination, pitch, 0, size, lines, self._stream)

    def synchronize(self) -> None:
        self._do(self._cuda.cuStreamSynchronize, self._stream)

    def record_event(self) -> Any:
        event = self._do(self._cuda.cuEventCreate, self._cuda.CUevent_flags.CU_EVENT_DEFAULT)
        self._do(self._cuda.cuEventRecord, event, self._stream)
        return _Owned(event, self._cuda.cuEventDestroy)

    def elapsed_ms(self, start: Any, end: Any) -> float:
        self._do(self._cuda.cuEventSynchronize, end.handle)
        return self._do(self._cuda.cuEventElapsedTime, start.handle, end.handle)

    def begin_capture(self) -> None:
        # Other threads, such as TensorRT's, may use CUDA during the capture.
        mode = self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._do(self._cuda.cuStreamBeginCapture, self._stream, mode)

    def end_capture(self) -> Any:
        graph = self._do(self._cuda.cuStreamEndCapture, self._stream)
        try:
            return _Owned(self._do(self._cuda.cuGraphInstantiate, graph, 0), self._cuda.cuGraphExecDestroy)
        finally:
            self._do(self._cuda.cuGraphDestroy, graph)

    def replay(self, graph: Any) -> None:
        self._do(self._cuda.cuGraphLaunch, graph.handle, self._stream)

    def _free_staging(self, size: int) -> _Staging:
        for staging in self._staging:
            if staging.size >= size and self._is_done(staging.copied):
                return staging
        size = 1 << (size - 1).bit_length()
        event = self._do(self._cuda.cuEventCreate, self._cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        staging = _Staging(int(self._do(self._cuda.cuMemHostAlloc, size, 0)), size, event)
        self._staging.append(staging)
        # The smallest that fits comes first.
        self._staging.sort(key=lambda staging: staging.size)
        return staging

    def _is_done(self, event: Any) -> bool:
        self._enter()
        (status,) = self._cuda.cuEventQuery(event)
        if status != self._cuda.CUresult.CUDA_ERROR_NOT_READY:
            self._checked((status,))
        return bool(status == self._cuda.CUresult.CUDA_SUCCESS)

    def _enter(self) -> None:
        """Make the context current, which CUDA tracks for each thread."""
        self._checked(self._cuda.cuCtxSetCurrent(self._context))

    def _do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self._enter()
        return self._checked(function(*arguments))

    def _checked(self, result: tuple[Any, ...]) -> Any:
        """Return what a driver function returned after its status. Raises `BackendError` for a failure."""
        status, *values = result
        if status != self._cuda.CUresult.CUDA_SUCCESS:
            raise BackendError(f"CUDA refused: {self._reason(status)}. After such an error, start the program again.")
        return values[0] if len(values) == 1 else tuple(values)

    def _reason(self, status: Any) -> str:
        found, text = self._cuda.cuGetErrorString(status)
        reason = text.decode() if found == self._cuda.CUresult.CUDA_SUCCESS else "unknown error"
        return f"{reason} ({getattr(status, 'name', status)})"


class _Staging(NamedTuple):
    """Pinned host memory, and the event after the last copy from it."""

    address: Address
    size: int
    copied: Any


class _Owned:
    """A driver object that is destroyed with the last reference to it."""

    def __init__(self, handle: Any, destroy: Callable[[Any], Any]) -> None:
        self.handle = handle
        weakref.finalize(self, destroy, handle).atexit = False


_NEEDS_GPU = "Backends on CUDA need an NVIDIA GPU and its driver; without one, run on ort-cpu."
