"""OpenVINO on the CPU. Tensors are host arrays; the cache of a decoder segment is the state of an inference request.

Selection is computed in fp32 always, and everything else as `compute` says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sinkprune.contract.errors import BackendError
from sinkprune.contract.manifest import CacheForm, TensorSpec
from sinkprune.contract.precision import Array
from sinkprune.runtime.backends import Backend, Compute, Engine
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.backends.openvino_graphs import BEAM, GraphReader, rows_in_int8
from sinkprune.runtime.backends.row_runs import joined
from sinkprune.runtime.cores import usable_cores
from sinkprune.runtime.openvino_library import import_openvino, words

_DEVICE = "CPU"
_ANY_SIZE = 1
_PATCHES = 64
"""So many patches are whole tokens of every tower, whose tokens are squares of 1, 2, 4 or 8 patches a side."""


class OpenVinoBackend(Backend):
    """OpenVINO's CPU plugin; calls of engines return when they are done."""

    def __init__(self, name: str, threads: int | None, compute: Compute) -> None:
        """Raises `BackendError` where openvino is missing, or the processor has no bf16 and `compute` asks for it."""
        openvino = import_openvino(name)
        self._core = openvino.Core()
        self._reader = GraphReader(openvino, self._core)
        has_bf16 = "BF16" in self._core.get_property(_DEVICE, "OPTIMIZATION_CAPABILITIES")
        if compute == "bf16" and not has_bf16:
            processor = self._core.get_property(_DEVICE, "FULL_DEVICE_NAME")
            raise BackendError(
                f"backend '{name}' was to compute in bf16, which the processor here ({processor}) lacks. Leave "
                "--compute out: it then takes the fastest types there are."
            )
        self._float = "bf16" if has_bf16 and compute != "fp32" else "f32"
        self._rounds_rows = compute == "fastest"
        self.name = name
        self.threads = threads or usable_cores()
        told = {"bf16": "bf16", "f32": "fp32"}[self._float]
        self.versions = {
            "openvino": openvino.__version__,
            "compute": f"{told}, int8 where weights are quantised" if self._rounds_rows else told,
        }

    def load(self, model: Model) -> _OpenVinoEngine:
        compiled = self._compiled(model, self._reader.read(model, self.name))
        return _OpenVinoEngine(model.graph, compiled.create_infer_request())

    def load_decoder(
        self, model: Model, layers: range, form: CacheForm, wrap: Callable[[Engine], Engine]
    ) -> _OpenVinoDecoder:
        if form != "in-place":
            raise BackendError(
                f"backend '{self.name}' takes graphs whose caches are written in place, and '{model.file.path}' gives "
                "its new rows. Export the bundle again with --dialect opset24."
            )
        read = self._reader.read(model, self.name)
        self._reader.keep_caches(read, layers)
        return _OpenVinoDecoder(model.graph, self._compiled(model, read), wrap)

    def _compiled(self, model: Model, read: Any) -> Any:
        """The model that `read` is, compiled and run once.

        With its first call OpenVINO packs matrices anew, for all shapes, and reads the files of weights no more.
        """
        selects = not model.weights
        own = "f32" if selects else self._float
        properties = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
            "INFERENCE_NUM_THREADS": self.threads,
            "INFERENCE_PRECISION_HINT": own,
            "KV_CACHE_PRECISION": own,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": rows_in_int8(read) if self._rounds_rows else 0,
        }
        try:
            if selects:
                return self._core.compile_model(read, _DEVICE, properties)
            with model.by_path():
                compiled = self._core.compile_model(read, _DEVICE, properties)
                compiled.create_infer_request().infer([_smallest(port) for port in read.inputs])
                return compiled
        except RuntimeError as error:
            raise BackendError(f"backend '{self.name}' cannot load '{model.file.path}': {words(error)}.") from error

    def tensor(self, array: Array) -> Array:
        return np.ascontiguousarray(array)

    def numpy(self, tensor: Array) -> Array:
        """`tensor`, which is a host array in memory of its own."""
        return tensor

    def join(self, parts: Sequence[Array], order: Array) -> Array:
        return joined(parts, order)

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed_ms(self, start: float, end: float) -> float:
        return (end - start) * 1e3


class _OpenVinoEngine:
    """One compiled model with an inference request of its own."""

    def __init__(self, graph: str, request: Any) -> None:
        self._graph, self._request = graph, request

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return _infer(self._graph, self._request, inputs)


class _OpenVinoCache:
    """The keys and values of one segment, of one answer: the states of an inference request."""

    def __init__(self, request: Any) -> None:
        self.request, self.length = request, 0


class _OpenVinoDecoder:
    """One compiled segment, whose caches are states of inference requests, one for each answer."""

    def __init__(self, graph: str, compiled: Any, wrap: Callable[[Engine], Engine]) -> None:
        self._graph, self._compiled = graph, compiled
        self._engine = wrap(self._run)
        self._request: Any = None

    def new_cache(self) -> _OpenVinoCache:
        return _OpenVinoCache(self._compiled.create_infer_request())

    def __call__(self, inputs: Mapping[str, Array], rows: int, cache: _OpenVinoCache) -> dict[str, Array]:
        self._request = cache.request
        outputs = self._engine({**inputs, "past_length": np.array([cache.length]), BEAM: np.zeros(1, np.int32)})
        cache.length += rows
        return outputs

    def _run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return _infer(self._graph, self._request, inputs)


def _infer(graph: str, request: Any, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """All outputs of `request` by name, in memory of their own; raises `BackendError`."""
    compiled = request.get_compiled_model()
    own = {port.any_name: inputs[port.any_name] for port in compiled.inputs}
    try:
        request.infer(own, share_inputs=True, share_outputs=True)
    except RuntimeError as error:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in own.items())
        raise BackendError(
            f"graph '{graph}' failed in openvino on {shapes}: {words(error)}. If memory ran out, end other programs; "
            "if not, export the bundle again."
        ) from error
    return {port.any_name: request.get_tensor(port).data.copy() for port in compiled.outputs}


def _smallest(port: Any) -> Array:
    """Zeros for an input of a model, in the smallest shape that every tower and segment takes."""
    sizes = [size.get_length() if size.is_static else _ANY_SIZE for size in port.partial_shape]
    return np.zeros(sizes, port.element_type.to_dtype())
