"""The buffers of caches as OrtValues, on a CPU or a CUDA GPU."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from sinkprune.contract.precision import Array
from sinkprune.runtime.backends.host_buffers import HostBuffers
from sinkprune.runtime.backends.kv_cache import CacheMemory
from sinkprune.runtime.backends.onnxruntime.row_writer import RowWriter

_DTYPES = {"tensor(float)": "float32", "tensor(float16)": "float16"}


class CpuMemory(CacheMemory):
    """Buffers in host memory that requests take turns in."""

    def __init__(self, onnxruntime: Any) -> None:
        self._ort, self._blocks = onnxruntime, HostBuffers()

    def tensor(self, array: Array) -> Any:
        return self._ort.OrtValue.ortvalue_from_numpy(array)

    def rows(self, tensor: Any) -> int:
        rows: int = tensor.shape()[1]
        return rows

    def buffer(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        # An OrtValue holds the array that it was made of.
        return self.tensor(self._blocks.lend(prod(shape) * dtype.itemsize).view(dtype).reshape(shape))

    def copy_rows(self, source: Any, target: Any, place: int) -> None:
        rows = source.numpy()
        target.numpy()[:, :, place : place + rows.shape[2]] = rows

    def zero_rows(self, target: Any, first: int) -> None:
        target.numpy()[:, :, first:] = 0


class GpuMemory(CacheMemory):
    """Buffers in a GPU's memory, of which onnxruntime's own allocator keeps what comes back.

    Rows are copied on the device. New buffers are filled with zeros from the host.
    """

    def __init__(self, onnxruntime: Any, provider: str = "CUDAExecutionProvider", device: str = "cuda") -> None:
        self._ort, self._device = onnxruntime, device
        self._writer = RowWriter(onnxruntime, provider, device)

    def tensor(self, array: Array) -> Any:
        return self._ort.OrtValue.ortvalue_from_numpy(array, self._device, 0)

    def rows(self, tensor: Any) -> int:
        rows: int = tensor.shape()[1]
        return rows

    def buffer(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return self.tensor(np.zeros(shape, dtype))

    def copy_rows(self, source: Any, target: Any, place: int) -> None:
        self._writer.write(source, target, place, _DTYPES[target.data_type()])

    def zero_rows(self, target: Any, first: int) -> None:
        """They are: nothing was written there since `buffer`."""
