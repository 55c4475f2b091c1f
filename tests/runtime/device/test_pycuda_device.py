"""The device on pycuda, without a GPU and without pycuda, which builds on a board only: a recording fake stands in.

The fake has the names of pycuda's documentation. Not tested: that pycuda has these names, and what it does.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest

from sinkprune.contract.errors import BackendError
from sinkprune.runtime.device import cuda
from sinkprune.runtime.device.cuda import PycudaDevice

NAMES = (
    *("Device", "Error", "Event", "MemoryError", "Memcpy2D", "Stream", "device_attribute", "init", "mem_alloc"),
    *("mem_get_info", "memcpy_dtod_async", "memcpy_dtoh_async", "memcpy_htod_async", "memset_d2d8_async"),
    "pagelocked_empty",
)


class DriverError(Exception):
    pass


class OutOfMemoryError(DriverError):
    pass


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`pycuda.driver`, which records every call."""
    fake = Mock(spec=NAMES, Error=DriverError, MemoryError=OutOfMemoryError)
    fake.device_attribute = SimpleNamespace(INTEGRATED="integrated")
    gpu = Mock(spec=["retain_primary_context", "name", "compute_capability", "get_attribute"])
    gpu.name.return_value, gpu.compute_capability.return_value = "Orin", (8, 7)
    gpu.get_attribute.side_effect = {"integrated": 0}.__getitem__
    fake.Device.return_value = gpu
    fake.Stream.return_value = Mock(spec=["handle", "synchronize"], handle=77)
    fake.Event.side_effect = FakeEvent
    fake.mem_get_info.return_value = (3_000_000, 8_000_000)
    fake.mem_alloc.return_value = MagicMock(spec=["__int__", "free"], __int__=lambda _: 4096)
    fake.pagelocked_empty.side_effect = np.empty
    fake.Memcpy2D.return_value = Mock(spec=["set_src_device", "set_dst_device"])
    monkeypatch.setattr(cuda, "_import_driver", lambda *_: fake)
    return fake


class FakeEvent:
    """An event that is reached when a test says so."""

    reached = False

    def record(self, stream: Any) -> FakeEvent:
        assert stream.handle == 77
        return self

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.reached = True


def test_without_pycuda_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycuda", None)
    with pytest.raises(BackendError, match=r"^pycuda cannot be imported \(.*\)\. Install cuda-python with: pip"):
        PycudaDevice()


def test_facts_and_memory_of_the_device(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = PycudaDevice()
    assert device.allocate(64) == 4096
    fake.mem_alloc.assert_called_once_with(64)
    device.free(4096)
    fake.mem_alloc.return_value.free.assert_called_once_with()
    fake.mem_alloc.side_effect = OutOfMemoryError
    with pytest.raises(BackendError, match=r"9\.0 MB are needed, 3\.0 of 8\.0 MB are free"):
        device.allocate(9_000_000)
    assert (device.name, device.compute_capability, device.stream, device.has_graphs) == ("Orin", 87, 77, False)
    fake.Device.return_value.retain_primary_context.return_value.push.assert_called_once_with()
    # A board counts what the system can reclaim.
    monkeypatch.setattr(cuda, "available_bytes", lambda: 5_000_000)
    for integrated, free in ((0, 3_000_000), (1, 5_000_000)):
        fake.Device.return_value.get_attribute.side_effect = {"integrated": integrated}.__getitem__
        assert PycudaDevice().memory() == (free, 8_000_000)


def test_copies_in_pass_through_pinned_memory_that_lives_until_its_copy_is_done(fake: Any) -> None:
    device, array = PycudaDevice(), np.arange(6, dtype=np.float32).reshape(2, 3)
    for _ in range(3):
        device.copy_in(4096, array)
    array[:] = -1
    (address, staging, stream), _ = fake.memcpy_htod_async.call_args
    assert (address, stream.handle, staging.tolist()) == (4096, 77, [[0, 1, 2], [3, 4, 5]])
    assert len(device._staging) == 3
    for _, copied in device._staging[:2]:
        copied.synchronize()
    device.copy_in(4096, array)
    assert len(device._staging) == 2
    device.copy_in(4096, np.empty((0, 4), np.float32))
    assert fake.memcpy_htod_async.call_count == 4
