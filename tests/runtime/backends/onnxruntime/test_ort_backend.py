"""ONNX Runtime: tensors whose memory is their own, what it refuses, and the name of the GPU."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from sinkprune import Pipeline
from sinkprune.contract.errors import BackendError
from sinkprune.runtime.backends import load_backend
from sinkprune.runtime.backends.onnxruntime.cuda import gpu_name


def test_what_is_read_from_a_tensor_lies_in_memory_of_its_own() -> None:
    backend = load_backend("ort-cpu")
    given = np.arange(4, dtype=np.float32)
    read = backend.numpy(backend.tensor(given))
    np.testing.assert_array_equal(read, given)
    assert not np.shares_memory(read, given)


@pytest.mark.parametrize(
    ("library_error", "remedy"),
    [
        # Of onnxruntime 1.23, the last for Python 3.10, for a graph of opset24
        ("Load model failed: Unsupported model IR version: 12, max supported IR version: 11", "--dialect opset20"),
        # Of onnxruntime 1.24
        ("Could not find an implementation for TensorScatter(24) node with name 'x'", "--dialect opset20"),
        ("Load model failed: Protobuf parsing failed.", None),
    ],
)
def test_a_graph_newer_than_the_library_is_refused_with_the_dialect_that_it_reads(
    library_error: str, remedy: str | None, bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(library_error)

    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    with pytest.raises(BackendError) as raised:
        Pipeline.load(bundle("gqa-112"), backend="ort-cpu")
    assert library_error.removesuffix(".") in str(raised.value)
    assert (remedy in str(raised.value)) if remedy else ("--dialect" not in str(raised.value))


def test_a_path_that_is_not_utf8_is_named_and_refused(bundle: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/bundle-\xff"))
    shutil.copytree(bundle("gqa-112"), folder)
    with pytest.raises(BackendError, match=r"which is not UTF-8\. onnxruntime opens UTF-8 paths only\. Rename the"):
        Pipeline.load(folder, backend="ort-cpu")


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
