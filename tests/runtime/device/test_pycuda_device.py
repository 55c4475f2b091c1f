"""The device on pycuda, without a GPU and without pycuda, which builds on a board only: a fake driver stands in.

The fake has the names and signatures of pycuda's documentation. What is not seen here: that pycuda has them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sinkprune.contract.errors import BackendError
from sinkprune.runtime.device import pycuda_device
from sinkprune.runtime.device.pycuda_device import PycudaDevice


class FakePycudaDriver:
    """`pycuda.driver` with host memory behind addresses; copies happen when the stream is waited for."""

    class Error(Exception):
        """Its base class of errors."""

    class MemoryError(Error):
        """No memory is left."""

    device_attribute = SimpleNamespace(INTEGRATED="integrated")
    function_attribute = SimpleNamespace(MAX_DYNAMIC_SHARED_SIZE_BYTES="max dynamic shared")

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.memory: dict[int, np.ndarray[Any, Any]] = {}
        self.enqueued: list[Callable[[], None]] = []
        self.integrated = 0
        self.room = 8_000_000

    def init(self) -> None:
        self.calls.append(("init", None))

    def Device(self, number: int) -> Any:
        context = SimpleNamespace(push=lambda: self.calls.append(("push", number)))
        return SimpleNamespace(
            retain_primary_context=lambda: context,
            name=lambda: "Orin",
            compute_capability=lambda: (8, 7),
            get_attribute=lambda name: {"integrated": self.integrated}[name],
        )

    def Stream(self) -> Any:
        return SimpleNamespace(handle=77, synchronize=self._run)

    def Event(self) -> FakeEvent:
        return FakeEvent(self)

    def mem_get_info(self) -> tuple[int, int]:
        return 3_000_000, 8_000_000

    def mem_alloc(self, size: int) -> FakeAllocation:
        if size > self.room:
            raise self.MemoryError("cuMemAlloc failed: out of memory")
        address = 4096 * (1 + len(self.memory))
        self.memory[address] = np.zeros(size, np.uint8)
        return FakeAllocation(self, address)

    def pagelocked_empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        self.calls.append(("pagelocked_empty", shape))
        return np.empty(shape, dtype)

    def memcpy_htod_async(self, address: int, source: np.ndarray[Any, Any], stream: Any) -> None:
        def copy() -> None:
            self.memory[address][: source.nbytes] = np.frombuffer(source.tobytes(), np.uint8)

        self.enqueued.append(copy)

    def memcpy_dtoh_async(self, target: np.ndarray[Any, Any], address: int, stream: Any) -> None:
        def copy() -> None:
            target.reshape(-1).view(np.uint8)[:] = self.memory[address][: target.nbytes]

        self.enqueued.append(copy)

    def Memcpy2D(self) -> FakeLines:
        return FakeLines(self)

    def memset_d2d8_async(self, address: int, pitch: int, value: int, width: int, height: int, stream: Any) -> None:
        def fill() -> None:
            for line in range(height):
                start = address % 4096 + line * pitch
                self.memory[address - address % 4096][start : start + width] = value

        self.enqueued.append(fill)

    def module_from_buffer(self, image: bytes) -> Any:
        if not image.startswith(b"\x7fELF"):
            raise self.Error("no kernel image is available")
        return SimpleNamespace(get_function=lambda name: FakeFunction(self, name))

    def _run(self) -> None:
        for work in self.enqueued:
            work()
        self.enqueued.clear()


class FakeAllocation:
    """Memory that knows its address."""

    def __init__(self, driver: FakePycudaDriver, address: int) -> None:
        self._driver, self._address = driver, address

    def __int__(self) -> int:
        return self._address

    def free(self) -> None:
        del self._driver.memory[self._address]


class FakeLines:
    """A copy of lines; memory is found by the address that its block starts at, a multiple of 4096."""

    def __init__(self, driver: FakePycudaDriver) -> None:
        self._driver = driver

    def set_src_device(self, address: int) -> None:
        self._source = address

    def set_dst_device(self, address: int) -> None:
        self._target = address

    def __call__(self, stream: Any) -> None:
        def copy() -> None:
            source, target = (
                self._driver.memory[address - address % 4096][address % 4096 :]
                for address in (self._source, self._target)
            )
            for line in range(self.height):
                read, written = line * self.src_pitch, line * self.dst_pitch
                target[written : written + self.width_in_bytes] = source[read : read + self.width_in_bytes]

        self._driver.enqueued.append(copy)

    src_pitch: int
    dst_pitch: int
    width_in_bytes: int
    height: int


class FakeEvent:
    """A mark: reached once the stream has run."""

    def __init__(self, driver: FakePycudaDriver) -> None:
        self._driver, self._reached = driver, False

    def record(self, stream: Any) -> FakeEvent:
        self._driver.enqueued.append(lambda: setattr(self, "_reached", True))
        return self

    def query(self) -> bool:
        return self._reached

    def synchronize(self) -> None:
        self._driver._run()

    def time_since(self, start: FakeEvent) -> float:
        assert self._reached and start._reached
        return 1.5


class FakeFunction:
    """A kernel whose launches are recorded."""

    def __init__(self, driver: FakePycudaDriver, name: str) -> None:
        self._driver, self._name = driver, name

    def set_attribute(self, attribute: str, value: int) -> None:
        self._driver.calls.append((attribute, value))

    def __call__(self, *arguments: Any, **how: Any) -> None:
        self._driver.calls.append((self._name, (arguments, how)))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakePycudaDriver:
    fake = FakePycudaDriver()
    monkeypatch.setattr(pycuda_device, "_import_driver", lambda: fake)
    return fake


def test_without_pycuda_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycuda", None)
    with pytest.raises(
        BackendError, match=r"^pycuda cannot be imported \(.*\)\. Install cuda-python, or pycuda again"
    ):
        PycudaDevice()


def test_without_a_gpu_there_is_one_sentence(fake: FakePycudaDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise fake.Error("cuInit failed: no CUDA-capable device is detected")

    monkeypatch.setattr(fake, "init", refuse)
    with pytest.raises(BackendError, match="no CUDA-capable device"):
        PycudaDevice()


def test_facts_of_the_device(fake: FakePycudaDriver) -> None:
    device = PycudaDevice()
    assert (device.name, device.compute_capability, device.stream, device.has_graphs) == ("Orin", 87, 77, False)
    assert ("push", 0) in fake.calls
    assert device.memory() == (3_000_000, 8_000_000)


def test_a_board_counts_what_the_system_can_make_free(
    fake: FakePycudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.integrated = 1
    monkeypatch.setattr(pycuda_device, "available_bytes", lambda: 5_000_000)
    assert PycudaDevice().memory() == (5_000_000, 8_000_000)


def test_out_of_memory_names_need_and_free(fake: FakePycudaDriver) -> None:
    with pytest.raises(BackendError, match=r"9\.0 MB are needed, 3\.0 of 8\.0 MB are free"):
        PycudaDevice().allocate(9_000_000)


def test_copies_go_there_and_back_in_the_stream_s_order(fake: FakePycudaDriver) -> None:
    device = PycudaDevice()
    address = device.allocate(64)
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    device.copy_in(address, array)
    array[:] = -1
    back = np.empty((2, 3), np.float32)
    device.copy_out(back, address)
    assert back.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_lines_are_copied_and_made_zero(fake: FakePycudaDriver) -> None:
    device = PycudaDevice()
    source, target = device.allocate(64), device.allocate(64)
    device.copy_in(source, np.arange(1, 7, dtype=np.uint8))
    device.copy_in(target, np.full(12, 9, np.uint8))
    device.copy_lines(target + 1, 4, source, 2, 2, 3)
    device.zero_lines(target + 3, 4, 1, 3)
    back = np.empty(12, np.uint8)
    device.copy_out(back, target)
    assert back.tolist() == [9, 1, 2, 0, 9, 3, 4, 0, 9, 5, 6, 0]


def test_pinned_memory_lives_until_its_copy_is_done(fake: FakePycudaDriver) -> None:
    device = PycudaDevice()
    address = device.allocate(64)
    for value in range(3):
        device.copy_in(address, np.full(4, value, np.int32))
    assert len(device._staging) == 3
    device.synchronize()
    device.copy_in(address, np.full(4, 9, np.int32))
    assert len(device._staging) == 1


def test_nothing_is_copied_of_an_empty_array(fake: FakePycudaDriver) -> None:
    device = PycudaDevice()
    device.copy_in(device.allocate(1), np.empty((0, 4), np.float32))
    assert fake.enqueued == []


def test_memory_is_given_back(fake: FakePycudaDriver) -> None:
    device = PycudaDevice()
    address = device.allocate(64)
    device.free(address)
    assert fake.memory == {}


def test_events_tell_milliseconds(fake: FakePycudaDriver) -> None:
    device = PycudaDevice()
    start, end = device.record_event(), device.record_event()
    assert device.elapsed_ms(start, end) == 1.5


def test_kernels_are_launched_on_the_stream(fake: FakePycudaDriver) -> None:
    device = PycudaDevice()
    kernel = device.load_kernel(b"\x7fELF", "top_rho")
    arguments = (np.uint64(4096), np.int32(3))
    device.launch(kernel, (2, 1, 1), 128, 50 << 10, arguments)
    (given, how), *_ = [call for name, call in fake.calls if name == "top_rho"]
    assert given == arguments
    assert (how["block"], how["grid"], how["shared"], how["stream"].handle) == ((128, 1, 1), (2, 1, 1), 50 << 10, 77)
    assert ("max dynamic shared", 50 << 10) in fake.calls


def test_an_image_for_another_gpu_is_told_in_the_driver_s_words(fake: FakePycudaDriver) -> None:
    with pytest.raises(BackendError, match=r"CUDA refused: no kernel image is available\."):
        PycudaDevice().load_kernel(b"PTX", "top_rho")
