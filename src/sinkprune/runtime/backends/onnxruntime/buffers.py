"""The buffers of KV caches as OrtValues, on a CPU or a CUDA GPU."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from sinkprune.contract.precision import Array
from sinkprune.runtime.backends.host_buffers import HostBuffers
from sinkprune.runtime.backends.kv_cache import CacheMemory
from sinkprune.runtime.backends.onnxruntime.library import session_options

_INT64 = 7
_ELEMENT_TYPES = {"tensor(float)": 1, "tensor(float16)": 10}
"""By ONNX Runtime's names, the numbers of onnx.proto3."""


class _OrtMemory(CacheMemory):
    """Tensors as OrtValues on one device."""

    def __init__(self, onnxruntime: Any, device: str) -> None:
        self._ort, self._device = onnxruntime, device

    def tensor(self, array: Array) -> Any:
        return self._ort.OrtValue.ortvalue_from_numpy(array, self._device, 0)

    def rows(self, tensor: Any) -> int:
        return int(tensor.shape()[1])


class CpuMemory(_OrtMemory):
    """Buffers in host memory, which later requests reuse."""

    def __init__(self, onnxruntime: Any) -> None:
        super().__init__(onnxruntime, "cpu")
        self._blocks = HostBuffers()

    def buffers(self, count: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[Any]:
        # One block for all. The OrtValues keep it alive.
        block = self._blocks.lend(count * prod(shape) * dtype.itemsize)
        return [self.tensor(buffer) for buffer in block.view(dtype).reshape(count, *shape)]

    def copy_rows(self, source: Any, target: Any, place: int, rows: int) -> None:
        target.numpy()[:, :, place : place + rows] = source.numpy()[:, :, :rows]

    def zero_rows(self, target: Any, first: int) -> None:
        target.numpy()[:, :, first:] = 0


class GpuMemory(_OrtMemory):
    """Buffers in GPU memory, which ONNX Runtime's allocator reuses. New buffers are copied from zeros on the host.

    Rows are copied on the device. ONNX Runtime's Python copies whole tensors only, so a graph of one operator does
    it: ScatterND, whose output is bound to its first input, writes the given rows and nothing else.
    """

    def __init__(self, onnxruntime: Any, provider: str = "CUDAExecutionProvider", device: str = "cuda") -> None:
        super().__init__(onnxruntime, device)
        self._provider = provider
        self._session = lru_cache(self._new_session)

    def buffers(self, count: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[Any]:
        return [self.tensor(np.zeros(shape, dtype)) for _ in range(count)]

    def copy_rows(self, source: Any, target: Any, place: int, rows: int) -> None:
        _, heads, given, _ = source.shape()
        if rows < given:
            source = self.tensor(np.ascontiguousarray(source.numpy()[:, :, :rows]))
        indices = np.zeros((1, heads, rows, 3), np.int64)
        indices[..., 1] = np.arange(heads)[:, None]
        indices[..., 2] = np.arange(place, place + rows)
        session = self._session(_ELEMENT_TYPES[target.data_type()])
        binding = session.io_binding()
        for name, value in (("target", target), ("indices", self.tensor(indices)), ("source", source)):
            binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output("written", target)
        session.run_with_iobinding(binding)

    def zero_rows(self, target: Any, first: int) -> None:
        """Do nothing: `buffer` returns zeros, and these rows were not written since."""

    def _new_session(self, element_type: int) -> Any:
        options = session_options(self._ort)
        options.intra_op_num_threads = 1
        return self._ort.InferenceSession(
            scatter_graph(element_type), options, providers=[self._provider], enable_fallback=0
        )


def scatter_graph(element_type: int) -> bytes:
    """Return an ONNX file: written = ScatterND(target, indices, source), of operator set 13.

    Its few fields are encoded here, because the package onnx is too large for a robot.
    """
    inputs = {"target": element_type, "indices": _INT64, "source": element_type}
    node = b"".join(_field(1, name.encode()) for name in inputs) + _field(2, b"written") + _field(4, b"ScatterND")
    graph = _field(1, node) + _field(2, b"write_rows")
    graph += b"".join(_field(11, _value(name, kind)) for name, kind in inputs.items())
    graph += _field(12, _value("written", element_type))
    return _number(1, 8) + _field(7, graph) + _field(8, _field(1, b"") + _number(2, 13))


def _value(name: str, element_type: int) -> bytes:
    any_shape = _field(2, _field(1, b"") * 4)
    return _field(1, name.encode()) + _field(2, _field(1, _number(1, element_type) + any_shape))


def _field(number: int, content: bytes) -> bytes:
    """Return a protobuf field of bytes: its number, the length in groups of 7 bits, and the bytes."""
    length, groups = len(content), []
    while length > 127:
        groups.append(length & 127 | 128)
        length >>= 7
    return bytes([number << 3 | 2, *groups, length]) + content


def _number(number: int, value: int) -> bytes:
    """Return a protobuf field with a number below 128."""
    return bytes([number << 3, value])
