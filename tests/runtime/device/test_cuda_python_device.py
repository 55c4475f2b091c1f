"""The device on cuda-python, without a GPU: the real bindings check every argument, a fake driver answers.

Not tested: what a real driver does.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sinkprune.contract.errors import BackendError
from sinkprune.runtime.device import cuda
from sinkprune.runtime.device.cuda import CudaPythonDevice

driver = pytest.importorskip("cuda.bindings.driver")

try:
    driver.cuInit(0)
except RuntimeError:
    pass
else:
    pytest.skip("a CUDA driver is here: it would be called with made-up handles", allow_module_level=True)

PINNED = np.zeros(1 << 16, np.uint8)


class FakeDriver:
    """The bindings' functions: each checks its arguments, fails without a driver, and returns made-up values."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.statuses: dict[str, Any] = {}
        """The statuses of functions that fail, by name."""
        self.attributes = {"MAJOR": 8, "MINOR": 7, "INTEGRATED": 0}
        self._pinned = PINNED.ctypes.data
        self.values: dict[str, Callable[..., tuple[Any, ...]]] = {
            "cuDeviceGet": lambda *_: (driver.CUdevice(0),),
            "cuDevicePrimaryCtxRetain": lambda *_: (driver.CUcontext(1),),
            "cuDeviceGetName": lambda *_: (b"Orin\0\0\0",),
            "cuDeviceGetAttribute": lambda which, _: (self.attributes[which.name.split("_")[-1]],),
            "cuStreamCreate": lambda *_: (driver.CUstream(77),),
            "cuMemGetInfo": lambda: (3_000_000, 8_000_000),
            "cuMemAlloc": lambda *_: (driver.CUdeviceptr(4096),),
            "cuMemHostAlloc": self._pin,
            "cuEventCreate": lambda *_: (driver.CUevent(5),),
            "cuEventElapsedTime": lambda *_: (1.5,),
            "cuStreamEndCapture": lambda *_: (driver.CUgraph(8),),
            "cuGraphInstantiate": lambda *_: (driver.CUgraphExec(9),),
            "cuGetErrorString": lambda *_: (b"it broke",),
        }

    def names(self) -> list[str]:
        """The called functions without `cuCtxSetCurrent`, which precedes every call."""
        return [name for name, _ in self.calls if name != "cuCtxSetCurrent"]

    def arguments(self, name: str) -> list[tuple[Any, ...]]:
        return [arguments for called, arguments in self.calls if called == name]

    def __getattr__(self, name: str) -> Any:
        real = getattr(driver, name)
        if not name.startswith("cu"):
            return real

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, arguments))
            with pytest.raises(RuntimeError):
                real(*arguments)
            status = self.statuses.get(name, driver.CUresult.CUDA_SUCCESS)
            return (status, *self.values.get(name, lambda *_: ())(*arguments))

        return call

    def _pin(self, size: int, _: int) -> tuple[int]:
        self._pinned += size
        return (self._pinned - size,)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(cuda, "_import_driver", lambda *_: fake)
    return fake


def test_without_a_driver_or_a_gpu_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match=r"no NVIDIA driver is installed here: .* run on ort-cpu"):
        CudaPythonDevice()
    fake = FakeDriver()
    monkeypatch.setattr(cuda, "_import_driver", lambda *_: fake)
    fake.statuses["cuInit"] = driver.CUresult.CUDA_ERROR_NO_DEVICE
    with pytest.raises(BackendError, match=r"it broke \(CUDA_ERROR_NO_DEVICE\).* run on ort-cpu"):
        CudaPythonDevice()


def test_facts_and_memory_of_the_device(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaPythonDevice()
    assert (device.name, device.compute_capability, device.stream, device.has_graphs) == ("Orin", 87, 77, True)
    assert device.memory() == (3_000_000, 8_000_000)
    assert device.allocate(100) == 4096
    fake.statuses["cuMemAlloc"] = driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(BackendError, match=r"on Orin: 5\.0 MB are needed, 3\.0 of 8\.0 MB are free"):
        device.allocate(5_000_000)
    assert fake.arguments("cuStreamCreate") == [(driver.CUstream_flags.CU_STREAM_NON_BLOCKING,)]
    # A board counts what the system can reclaim.
    fake.attributes["INTEGRATED"] = 1
    for available, free in ((7_000_000, 7_000_000), (1_000_000, 3_000_000)):
        monkeypatch.setattr(cuda, "available_bytes", lambda available=available: available)
        assert CudaPythonDevice().memory() == (free, 8_000_000)


def test_copies_in_pass_through_pinned_memory_that_is_reused_when_its_copy_is_done(fake: FakeDriver) -> None:
    device, array = CudaPythonDevice(), np.arange(300, dtype=np.float32)
    for _ in range(3):
        device.copy_in(4096, array)
    fake.statuses["cuEventQuery"] = driver.CUresult.CUDA_ERROR_NOT_READY
    device.copy_in(4096, array)
    sources = [source for _, source, size, _ in fake.arguments("cuMemcpyHtoDAsync") if size == array.nbytes]
    assert sources[0] == sources[1] == sources[2] != sources[3]
    for source in sources:
        start = source - PINNED.ctypes.data
        np.testing.assert_array_equal(PINNED[start : start + array.nbytes].view(np.float32), array)
    # Recorded after the copy
    assert fake.names()[-2:] == ["cuMemcpyHtoDAsync", "cuEventRecord"]
    assert "cuStreamSynchronize" not in fake.names()


def test_lines_are_copied_and_made_zero_in_one_call_each(fake: FakeDriver) -> None:
    device = CudaPythonDevice()
    device.copy_lines(4096, 640, 8192, 64, 32, 4)
    device.zero_lines(4096, 640, 32, 4)
    assert fake.names()[-2:] == ["cuMemcpy2DAsync", "cuMemsetD2D8Async"]
    ((copy, stream),) = fake.arguments("cuMemcpy2DAsync")
    assert int(stream) == 77
    assert copy.srcMemoryType == copy.dstMemoryType == driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    assert (int(copy.dstDevice), copy.dstPitch, int(copy.srcDevice), copy.srcPitch) == (4096, 640, 8192, 64)
    assert (copy.WidthInBytes, copy.Height) == (32, 4)
    ((*zeros, stream),) = fake.arguments("cuMemsetD2D8Async")
    assert (zeros, int(stream)) == ([4096, 640, 0, 32, 4], 77)


def test_events_and_graphs_are_used_and_destroyed(fake: FakeDriver) -> None:
    device = CudaPythonDevice()
    start, end = device.record_event(), device.record_event()
    assert device.elapsed_ms(start, end) == 1.5
    assert fake.names()[-2:] == ["cuEventSynchronize", "cuEventElapsedTime"]
    device.begin_capture()
    graph = device.end_capture()
    device.replay(graph)
    captured = ["cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphInstantiate", "cuGraphDestroy", "cuGraphLaunch"]
    assert fake.names()[-5:] == captured
    del start, end, graph
    gc.collect()
    assert sorted(fake.names()[-3:]) == ["cuEventDestroy", "cuEventDestroy", "cuGraphExecDestroy"]


def test_every_call_sets_the_context_of_its_thread(fake: FakeDriver) -> None:
    device = CudaPythonDevice()
    fake.calls.clear()
    device.synchronize()
    device.allocate(10)
    names = [name for name, _ in fake.calls]
    assert names == ["cuCtxSetCurrent", "cuStreamSynchronize", "cuCtxSetCurrent", "cuMemAlloc"]
