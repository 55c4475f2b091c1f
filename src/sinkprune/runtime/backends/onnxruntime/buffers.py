"""The buffers of KV caches as OrtValues, on a CPU or a CUDA GPU."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from sinkprune.contract.precision import Array
from sinkprune.runtime.backends.host_buffers import HostBuffers
from sinkprune.runtime.backends.kv_cache import CacheMemory
from sinkprune.runtime.backends.onnxruntime.device_graphs import scatter_graph, zeros_graph
from sinkprune.runtime.backends.onnxruntime.library import session_options

Provider = str | tuple[str, dict[str, str]]
"""An execution provider, with its options if it has any."""
CUDA = ("CUDAExecutionProvider", {"use_tf32": "0"})
"""fp32 products round nothing to TF32: selection must choose the same tokens as on a CPU."""
_DTYPES = {"tensor(float)": "float32", "tensor(float16)": "float16"}
"""By ONNX Runtime's names."""


def small_session(onnxruntime: Any, graph: bytes, provider: Provider) -> Any:
    """Return a session of an ONNX file from `device_graphs`."""
    options = session_options(onnxruntime)
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(graph, options, providers=[provider], enable_fallback=0)


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
    """Buffers in GPU memory, which ONNX Runtime's allocator reuses. Graphs fill them and copy rows on the device."""

    def __init__(self, onnxruntime: Any, provider: Provider = CUDA, device: str = "cuda") -> None:
        super().__init__(onnxruntime, device)
        self._session = lru_cache(lambda graph, dtype: small_session(onnxruntime, graph(dtype), provider))
        # All layers of a call write rows to the same places.
        self._places = lru_cache(maxsize=1)(self._new_places)

    def buffers(self, count: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[Any]:
        binding = self._session(zeros_graph, dtype.name).io_binding()
        binding.bind_cpu_input("shape", np.array(shape, np.int64))
        return [self._new_output(dtype.name, binding) for _ in range(count)]

    def copy_rows(self, source: Any, target: Any, place: int, rows: int) -> None:
        session = self._session(scatter_graph, _DTYPES[target.data_type()])
        binding = session.io_binding()
        inputs = {"target": target, "source": source, **self._places(target.shape()[1], place, rows)}
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output("written", target)
        session.run_with_iobinding(binding)

    def zero_rows(self, target: Any, first: int) -> None:
        """Do nothing: `buffers` returns zeros, and these rows were not written since."""

    def _new_output(self, dtype: str, binding: Any) -> Any:
        binding.bind_output("zeros", self._device)
        self._session(zeros_graph, dtype).run_with_iobinding(binding)
        return binding.get_outputs()[0]

    def _new_places(self, heads: int, place: int, rows: int) -> dict[str, Any]:
        indices = np.zeros((1, heads, rows, 3), np.int64)
        indices[..., 1] = np.arange(heads)[:, None]
        indices[..., 2] = np.arange(place, place + rows)
        return {"indices": self.tensor(indices), "rows": self.tensor(np.arange(rows))}
