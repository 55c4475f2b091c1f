"""The GPU's name in reports. The driver is a fake: test_ort_cuda_gpu.py reads a real one."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from sinkprune.contract.errors import BackendError
from sinkprune.runtime.backends.onnxruntime.library import gpu_name


class FakeDriver:
    """Three functions of the CUDA driver. `failing` is the one that returns an error."""

    def __init__(self, failing: str = "") -> None:
        self._failing = failing

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == self._failing:
                return 100
            if name == "cuDeviceGetName":
                buffer, size, _ = arguments
                buffer.value = b"NVIDIA Thor"
                assert size == 256
            return 0

        call.__name__ = name
        return call


def test_it_is_the_driver_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: {"libcuda.so.1": FakeDriver()}[name])
    assert gpu_name() == "NVIDIA Thor"


@pytest.mark.parametrize("failing", ["cuInit", "cuDeviceGetName"])
def test_an_error_of_the_driver_is_told(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: FakeDriver(failing))
    with pytest.raises(BackendError, match=f"{failing} of the NVIDIA driver failed with 100. nvidia-smi -L"):
        gpu_name()


def test_without_a_driver_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(BackendError, match="needs an NVIDIA driver, and libcuda does not load"):
        gpu_name()
