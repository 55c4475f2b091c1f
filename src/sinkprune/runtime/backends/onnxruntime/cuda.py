"""ONNX Runtime on a CUDA GPU: caches in its memory, and captured CUDA graphs.

ONNX Runtime's Python copies whole tensors only, and from or to the host, so small graphs copy rows on the device.
The few fields of their files are encoded here, because the package onnx is too large for a robot.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import lru_cache
from io import StringIO
from typing import Any
from weakref import ref

import numpy as np

from sinkprune.contract.errors import BackendError
from sinkprune.contract.precision import Array
from sinkprune.runtime.backends import Engine
from sinkprune.runtime.backends.compatibility import BuiltEngines
from sinkprune.runtime.backends.known import Compute
from sinkprune.runtime.backends.kv_cache import CacheMemory
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.backends.onnxruntime.backend import OrtBackend, opened
from sinkprune.runtime.backends.onnxruntime.library import DTYPES, Provider, failed, session_options
from sinkprune.runtime.system import Turns

_INT64 = 7
_ELEMENT_TYPES = {"float32": 1, "float16": 10}
"""The numbers of onnx.proto3."""

Kind = tuple[int, int]
"""A tensor's element type, by the numbers of onnx.proto3, and how many dimensions it has."""


def zeros_graph(dtype: str) -> bytes:
    """Return an ONNX file: zeros = ConstantOfShape(shape), of `dtype` "float32" or "float16" and four dimensions."""
    kind = _ELEMENT_TYPES[dtype]
    zero = _number(1, 1) + _number(2, kind) + _field(9, bytes(np.dtype(dtype).itemsize))
    value = _field(1, b"value") + _number(20, 4) + _field(5, zero)
    node = _node("ConstantOfShape", ["shape"], "zeros") + _field(5, value)
    return _model([node], [_value("shape", _INT64, 1)], [_value("zeros", kind, 4)])


def scatter_graph(dtype: str) -> bytes:
    """Return an ONNX file: written = ScatterND(target, indices, Gather(source, rows, axis=2)).

    `target`, `source` and `written` have `dtype` and are [1,H,R,h]. `rows` [N] chooses rows of `source`; `indices`
    [1,H,N,3] are their places in `target`. Both are int64.
    """
    kind = _ELEMENT_TYPES[dtype]
    axis = _field(1, b"axis") + _number(20, 2) + _number(3, 2)
    gather = _node("Gather", ["source", "rows"], "taken") + _field(5, axis)
    scatter = _node("ScatterND", ["target", "indices", "taken"], "written")
    inputs = [_value("target", kind, 4), _value("indices", _INT64, 4), _value("source", kind, 4)]
    return _model([gather, scatter], [*inputs, _value("rows", _INT64, 1)], [_value("written", kind, 4)])


def copies_graph(kinds: Sequence[Kind]) -> bytes:
    """Return an ONNX file: copy_0 = source_0, copy_1 = source_1 and so on, of the given kinds."""
    nodes = [_node("Identity", [f"source_{number}"], f"copy_{number}") for number in range(len(kinds))]
    sources, copies = (
        [_value(f"{name}_{number}", *kind) for number, kind in enumerate(kinds)] for name in ("source", "copy")
    )
    return _model(nodes, sources, copies)


def _model(nodes: list[bytes], inputs: list[bytes], outputs: list[bytes]) -> bytes:
    graph = b"".join(_field(1, node) for node in nodes) + _field(2, b"rows")
    graph += b"".join(_field(11, value) for value in inputs) + b"".join(_field(12, value) for value in outputs)
    return _number(1, 8) + _field(7, graph) + _field(8, _field(1, b"") + _number(2, 13))


def _node(operator: str, inputs: list[str], output: str) -> bytes:
    names = b"".join(_field(1, name.encode()) for name in inputs)
    return names + _field(2, output.encode()) + _field(4, operator.encode())


def _value(name: str, element_type: int, dimensions: int) -> bytes:
    any_shape = _field(2, _field(1, b"") * dimensions)
    return _field(1, name.encode()) + _field(2, _field(1, _number(1, element_type) + any_shape))


def _field(number: int, content: bytes) -> bytes:
    """Return a protobuf field of bytes: its number, the length in groups of 7 bits, and the bytes."""
    length, groups = len(content), []
    while length > 127:
        groups.append(length & 127 | 128)
        length >>= 7
    return bytes([*_key(number, 2), *groups, length]) + content


def _number(number: int, value: int) -> bytes:
    return bytes([*_key(number, 0), value])


def _key(number: int, wire_type: int) -> bytes:
    """Return the first bytes of a protobuf field: its number, below 2048, and the type of what follows."""
    key = number << 3 | wire_type
    return bytes([key]) if key < 128 else bytes([key & 127 | 128, key >> 7])


CUDA = ("CUDAExecutionProvider", {"use_tf32": "0"})
"""fp32 products round nothing to TF32: selection must choose the same tokens as on a CPU."""
_CAPTURING: Provider = (CUDA[0], {**CUDA[1], "enable_cuda_graph": "1"})
"""The provider of sessions whose calls are captured."""
_TURNS = Turns()
"""While a thread of this process captures, CUDA refuses most calls of the others, and the capture fails."""


class OrtCudaBackend(OrtBackend):
    """ONNX Runtime on the first CUDA GPU. Threads take turns."""

    device, provider = "cuda", CUDA

    def __init__(self, name: str, threads: int | None, compute: Compute) -> None:
        super().__init__(name, threads, compute)
        load_cuda_libraries(self._ort)
        self.versions["gpu"] = gpu_name()
        self.turn, self._caches = _TURNS, GpuMemory(self._ort)

    def load_repeated(self, model: Model) -> Engine:
        with self.turn:
            session, _ = self._open(model, _CAPTURING)
        return CapturedEngine(self._ort, model, session, CUDA, self.device)


def open_backend(name: str, threads: int | None, compute: Compute, built: BuiltEngines | None) -> OrtBackend:
    """Open the backend `name` for the engines `built`, if any; raises `BackendError` and `EnginesError`."""
    return opened(OrtCudaBackend, name, threads, compute, built)


def load_cuda_libraries(onnxruntime: Any) -> None:
    """Load CUDA and cuDNN from NVIDIA's Python packages, where these are installed.

    Otherwise the system finds them, or the provider does not start. The library prints what it does not find.
    """
    if hasattr(onnxruntime, "preload_dlls"):
        with redirect_stdout(StringIO()):
            onnxruntime.preload_dlls(directory="")


def gpu_name() -> str:
    """Return the name of the first CUDA device, as the driver has it; raises `BackendError` where there is none.

    Source: CUDA Driver API. ONNX Runtime's Python does not tell it.
    """
    name, device = ctypes.create_string_buffer(256), ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BackendError(f"'ort-cuda' needs an NVIDIA driver, and libcuda does not load ({error}).") from error
    calls = (
        (driver.cuInit, 0),
        (driver.cuDeviceGet, ctypes.byref(device), 0),
        (driver.cuDeviceGetName, name, len(name), device),
    )
    for call, *arguments in calls:
        if (status := call(*arguments)) != 0:
            raise BackendError(
                f"'ort-cuda' needs a GPU, and {call.__name__} of the NVIDIA driver failed with {status}. "
                "nvidia-smi -L lists the GPUs."
            )
    return name.value.decode()


def small_session(onnxruntime: Any, graph: bytes, provider: Provider) -> Any:
    options = session_options(onnxruntime)
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(graph, options, providers=[provider], enable_fallback=0)


class GpuMemory(CacheMemory):
    """Buffers in GPU memory, which ONNX Runtime's allocator reuses. Graphs fill them and copy rows on the device."""

    def __init__(self, onnxruntime: Any, provider: Provider = CUDA, device: str = "cuda") -> None:
        self._ort, self._device = onnxruntime, device
        self._session = lru_cache(lambda graph, dtype: small_session(onnxruntime, graph(dtype), provider))
        # All layers of a call write rows to the same places.
        self._places = lru_cache(maxsize=1)(self._new_places)

    def tensor(self, array: Array) -> Any:
        return self._ort.OrtValue.ortvalue_from_numpy(array, self._device, 0)

    def rows(self, tensor: Any) -> int:
        return int(tensor.shape()[1])

    def buffers(self, count: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[Any]:
        binding = self._session(zeros_graph, dtype.name).io_binding()
        binding.bind_cpu_input("shape", np.array(shape, np.int64))
        return [self._new_output(dtype.name, binding) for _ in range(count)]

    def copy_rows(self, pairs: Iterable[tuple[Any, Any]], place: int, rows: int) -> None:
        for source, target in pairs:
            session = self._session(scatter_graph, DTYPES[target.data_type()])
            binding = session.io_binding()
            inputs = {"target": target, "source": source, **self._places(target.shape()[1], place, rows)}
            for name, value in inputs.items():
                binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output("written", target)
            session.run_with_iobinding(binding)

    def zero_rows(self, targets: Iterable[Any], first: int) -> None:
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


MOST = 16
"""Sets of input shapes whose calls are captured: ONNX Runtime frees a captured graph with its session only.

At pi0's true shapes each has 15 MB of inputs. Calls with further shapes run kernel by kernel.
"""
_NOT_CAPTURED = -1
"""ONNX Runtime's number of a call that launches kernel by kernel."""

Shapes = tuple[tuple[int, ...], ...]
"""The shapes of all inputs."""


class CapturedEngine:
    """One session, whose calls are captured once for each set of input shapes and replayed from then on.

    A CUDA graph reads and writes the addresses that it was captured with. So inputs are copied into tensors of its
    own, and outputs out of them. An input that the last call had too is not copied again: nothing may write to it
    in between. Source: ONNX Runtime's documentation of the CUDA provider, `enable_cuda_graph`.
    """

    def __init__(self, onnxruntime: Any, model: Model, session: Any, provider: Provider, device: str) -> None:
        """Call `session`, of `model`, whose outputs have fixed sizes. `provider` copies tensors on `device`."""
        self._ort, self._model, self._session, self._device = onnxruntime, model, session, device
        self._inputs = [value.name for value in session.get_inputs()]
        self._copies = lru_cache(lambda *kinds: small_session(onnxruntime, copies_graph(kinds), provider))
        self._calls: dict[Shapes, _Call] = {}

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return all outputs by name, from all inputs by name; called in a `turn`."""
        try:
            call = self._call_of(inputs)
            changed = [name for name in self._inputs if inputs[name] is not call.copied_from(name)]
            # After an error in between, nothing counts as copied.
            call.copied = {}
            self._copy([inputs[name] for name in changed], [call.inputs[name] for name in changed])
            self._session.run_with_iobinding(call.binding, call.options)
            call.copied = {name: ref(value) for name, value in inputs.items()}
            return dict(zip(call.outputs, self._copy(list(call.outputs.values())), strict=True))
        except Exception as error:
            raise failed(self._model.graph, inputs, error) from error

    def _call_of(self, inputs: Mapping[str, Any]) -> _Call:
        shapes = tuple(tuple(inputs[name].shape()) for name in self._inputs)
        if shapes in self._calls:
            return self._calls[shapes]
        if len(self._calls) > MOST:
            # The last one, which is not captured.
            self._calls.popitem()
        captured = len(self._calls) < MOST
        options = self._ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(len(self._calls) + 1 if captured else _NOT_CAPTURED))
        # Not in the memory of the session, which a captured graph reuses.
        own = {name: self._empty(inputs[name].shape(), inputs[name].element_type()) for name in self._inputs}
        outputs = {spec.name: self._empty(spec.shape, np.dtype(spec.dtype)) for spec in self._model.spec.outputs}
        binding = self._session.io_binding()
        for name, value in own.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in outputs.items():
            binding.bind_ortvalue_output(name, value)
        self._calls[shapes] = _Call(binding, options, own, outputs)
        return self._calls[shapes]

    def _empty(self, shape: Sequence[Any], element_type: Any) -> Any:
        return self._ort.OrtValue.ortvalue_from_shape_and_type(list(shape), element_type, self._device, 0)

    def _copy(self, sources: Sequence[Any], targets: Sequence[Any] | None = None) -> list[Any]:
        """Copy tensors on the device, all in one call, to `targets` or into new memory; returns the copies."""
        if not sources:
            return []
        kinds: list[Kind] = [(value.element_type(), len(value.shape())) for value in sources]
        session = self._copies(*kinds)
        binding = session.io_binding()
        for number, source in enumerate(sources):
            binding.bind_ortvalue_input(f"source_{number}", source)
            if targets is None:
                binding.bind_output(f"copy_{number}", self._device)
            else:
                binding.bind_ortvalue_output(f"copy_{number}", targets[number])
        session.run_with_iobinding(binding)
        return binding.get_outputs()


@dataclass
class _Call:
    """A call with inputs of certain shapes: its tensors, at the addresses of its CUDA graph."""

    binding: Any
    options: Any
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    copied: dict[str, ref[Any]] = field(default_factory=dict)
    """The tensors whose values `inputs` has, by name."""

    def copied_from(self, name: str) -> Any:
        """Return the tensor whose values the input `name` has; None if there is none, or nobody holds it any more."""
        return self.copied[name]() if name in self.copied else None
