"""Writes rows into a larger tensor on the device that holds both, with a graph of one operator in ONNX Runtime.

ONNX Runtime's Python copies whole tensors only. ScatterND writes the rows where its indices say, and nothing else
when its output is bound to its first input. The graph's bytes are made here, because onnx is not for a robot.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sinkprune.runtime.backends.onnxruntime.library import session_options

_INT64 = 7
_ELEMENT_TYPES = {"float32": 1, "float16": 10}
"""By numpy's names, the numbers of onnx.proto3."""


class RowWriter:
    """Copies rows of tensors [1,H,R,h] between tensors on one device."""

    def __init__(self, onnxruntime: Any, provider: str, device: str) -> None:
        """`provider` runs the operator on `device`: CUDAExecutionProvider on cuda, for example."""
        self._ort, self._provider, self._device = onnxruntime, provider, device
        self._sessions: dict[str, Any] = {}

    def write(self, source: Any, target: Any, place: int, dtype: str) -> None:
        """Copy all rows of the OrtValue `source` [1,H,R,h] to those of `target` [1,H,C,h] from `place` on."""
        _, heads, rows, _ = source.shape()
        indices = np.zeros((1, heads, rows, 3), np.int64)
        indices[..., 1] = np.arange(heads)[:, None]
        indices[..., 2] = np.arange(place, place + rows)
        binding = self._session(dtype).io_binding()
        binding.bind_ortvalue_input("target", target)
        binding.bind_ortvalue_input("indices", self._ort.OrtValue.ortvalue_from_numpy(indices, self._device, 0))
        binding.bind_ortvalue_input("source", source)
        binding.bind_ortvalue_output("written", target)
        self._session(dtype).run_with_iobinding(binding)

    def _session(self, dtype: str) -> Any:
        if dtype not in self._sessions:
            options = session_options(self._ort)
            options.intra_op_num_threads = 1
            model = _scatter(_ELEMENT_TYPES[dtype])
            self._sessions[dtype] = self._ort.InferenceSession(
                model, options, providers=[self._provider], enable_fallback=0
            )
        return self._sessions[dtype]


def _scatter(element_type: int) -> bytes:
    """An ONNX model: written = ScatterND(target, indices, source), of operator set 13."""
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
    """A field of protobuf that holds bytes: its number, the length in groups of 7 bits, and the bytes."""
    length, groups = len(content), []
    while length > 127:
        groups.append(length & 127 | 128)
        length >>= 7
    return bytes([number << 3 | 2, *groups, length]) + content


def _number(number: int, value: int) -> bytes:
    """A field of protobuf that holds a number below 128."""
    return bytes([number << 3, value])
