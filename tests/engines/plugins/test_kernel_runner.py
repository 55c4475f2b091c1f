"""The runner loads each kernel once and passes each launch to the driver; `FakeDriver` replaces libcuda."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from sinkprune.contract.errors import BackendError
from sinkprune.engines.plugins import launches as kernel_runner
from sinkprune.engines.plugins.launches import Binary, KernelRunner, Launch

SM = 87
OUT_OF_MEMORY = 2


@dataclass
class FakeDriver:
    """Records calls of the driver's functions, and reads the parameters of a launch as a GPU would."""

    refuse: str = ""
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    types: tuple[Any, ...] = ()
    """The types of the kernel's parameters, which the driver reads from the binary."""

    def cuCtxGetDevice(self, device: Any) -> int:
        device._obj.value = 3
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
        assert device.value == 3
        value._obj.value = {75: SM // 10, 76: SM % 10}[attribute]
        return 0

    def cuModuleLoadData(self, module: Any, image: bytes) -> int:
        self.calls.append(("load", image))
        module._obj.value = 100 + len(self.calls)
        return OUT_OF_MEMORY if self.refuse == "load" else 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        self.calls.append(("get", module.value, name))
        function._obj.value = 1 << 40
        return 0

    def cuLaunchKernel(self, function: Any, *rest: Any) -> int:
        *extents, stream, parameters, extra = rest
        assert extra is None
        values = [kind.from_address(place).value for kind, place in zip(self.types, parameters, strict=True)]
        self.calls.append(("launch", function.value, [extent.value for extent in extents], stream.value, values))
        return OUT_OF_MEMORY if self.refuse == "launch" else 0

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = b"out of memory"
        return 0


@pytest.fixture(autouse=True)
def shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the shipped kernels by small ones."""

    def binary(kernel: str, dtype: str, sm: int) -> Binary:
        assert (dtype, sm) == ("float16", SM)
        return Binary(image=kernel.encode(), entry=f"{kernel}_entry", threads=128, shared_bytes=1000)

    monkeypatch.setattr(kernel_runner, "binary", binary)


def launch(kernel: str, *arguments: np.uint64 | np.int32) -> Launch:
    return Launch(kernel, "float16", (4, 2, 1), arguments)


def test_a_launch_reaches_the_driver_unchanged_and_its_kernel_is_loaded_once_before() -> None:
    driver = FakeDriver(types=(ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint64))
    runner, given = KernelRunner(lambda: driver), (np.uint64(2**63 + 1), np.int32(-7), np.uint64(5))
    runner.prepare([launch("small"), launch("other"), launch("small")])
    loads = [call for call in driver.calls if call[0] == "load"]
    assert loads == [("load", b"small\0"), ("load", b"other\0")]
    assert ("get", 101, b"small_entry") in driver.calls
    driver.calls.clear()
    runner.run([launch("other", *given), launch("small", *given)], stream=77)
    expected = ("launch", 1 << 40, [4, 2, 1, 128, 1, 1, 1000], 77, [2**63 + 1, -7, 5])
    assert driver.calls == [expected, expected]


def test_a_refusal_of_the_driver_and_its_absence_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    for refuse, function in (("load", "cuModuleLoadData"), ("launch", "cuLaunchKernel")):
        driver = FakeDriver(refuse=refuse)
        with pytest.raises(BackendError, match=rf"CUDA refused {function} .* out of memory \(error 2\)"):
            KernelRunner(lambda own=driver: own).run([launch("small")], stream=1)
    missing = Mock(side_effect=OSError("libcuda.so.1: cannot open shared object file"))
    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(BackendError, match=r"need an NVIDIA GPU and its driver, and libcuda does not load \(libcuda"):
        KernelRunner().run([launch("small")], stream=1)
