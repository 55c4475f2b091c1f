"""The runner loads each kernel once and passes each launch to the driver; `FakeDriver` replaces libcuda."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

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


def test_a_launch_reaches_the_driver_unchanged() -> None:
    driver = FakeDriver(types=(ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint64))
    runner = KernelRunner(lambda: driver)
    runner.run([launch("small", np.uint64(2**63 + 1), np.int32(-7), np.uint64(5))], stream=77)
    assert driver.calls == [
        ("load", b"small\0"),
        ("get", 101, b"small_entry"),
        ("launch", 1 << 40, [4, 2, 1, 128, 1, 1, 1000], 77, [2**63 + 1, -7, 5]),
    ]


def test_kernels_are_loaded_once_and_before_they_run() -> None:
    driver = FakeDriver()
    runner = KernelRunner(lambda: driver)
    runner.prepare([launch("small"), launch("other"), launch("small")])
    loading = list(driver.calls)
    assert [call for call in loading if call[0] == "load"] == [("load", b"small\0"), ("load", b"other\0")]
    runner.run([launch("other"), launch("small")], stream=1)
    assert [call[0] for call in driver.calls[len(loading) :]] == ["launch", "launch"]


@pytest.mark.parametrize(("refuse", "function"), [("load", "cuModuleLoadData"), ("launch", "cuLaunchKernel")])
def test_a_refusal_of_the_driver_is_an_error(refuse: str, function: str) -> None:
    runner = KernelRunner(lambda: FakeDriver(refuse=refuse))
    with pytest.raises(BackendError, match=rf"CUDA refused {function} .* out of memory \(error 2\)"):
        runner.run([launch("small")], stream=1)


def test_a_missing_driver_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    runner = KernelRunner()
    with pytest.raises(BackendError, match=r"need an NVIDIA GPU and its driver, and libcuda does not load \(libcuda"):
        runner.run([launch("small")], stream=1)
