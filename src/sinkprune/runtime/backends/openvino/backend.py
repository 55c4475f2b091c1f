"""OpenVINO, on a CPU or a GPU of Intel. Tensors are host arrays; the cache of a decoder segment is the state of an
inference request.

Selection is computed in fp32 always, and everything else as `compute` says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sinkprune.contract.errors import BackendError
from sinkprune.contract.manifest import CacheForm
from sinkprune.contract.precision import Array
from sinkprune.runtime.backends import Backend, Cache, Decoder, Engine
from sinkprune.runtime.backends.compatibility import BuiltEngines
from sinkprune.runtime.backends.known import Compute
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.backends.openvino.blocks import fill_blocks
from sinkprune.runtime.backends.openvino.devices import DEVICES
from sinkprune.runtime.backends.openvino.graphs import BEAM, WEIGHTS, GraphReader, paths
from sinkprune.runtime.backends.openvino.library import import_openvino, words
from sinkprune.runtime.backends.row_runs import joined
from sinkprune.runtime.system.turns import Turns

_NO_BEAM = np.zeros(1, np.int32)
# The fewest patches of the first run, as whole visual tokens.
_PATCHES = 64


def open_backend(name: str, threads: int | None, compute: Compute, built: BuiltEngines | None) -> OpenVinoBackend:
    """The backend `name`, whose library fits the engines `built`; raises `BackendError` and `EnginesError`."""
    backend = OpenVinoBackend(name, threads, compute)
    if built is not None:
        built.check_library("openvino", backend.versions["openvino"])
    return backend


class OpenVinoBackend(Backend):
    """OpenVINO on one of `DEVICES`; calls of engines return when they are done."""

    def __init__(self, name: str, threads: int | None, compute: Compute) -> None:
        """Raises `BackendError` where openvino or the device is missing, or cannot compute in what is asked for."""
        openvino = import_openvino(name)
        self._openvino, self._core = openvino, openvino.Core()
        # Which matrices it reads from a mapped file for as long as it runs depends on the processor, and a file that
        # is cut off would end the process. So it reads all weights into memory of its own.
        self._core.set_property({"ENABLE_MMAP": False})
        self.turn = Turns()
        self._reader = GraphReader(openvino, self._core)
        self._device = DEVICES[name](self._core, name, threads, compute)
        self.name = name
        self.threads, self.compute, self.cache = self._device.threads, self._device.compute, self._device.cache
        self.versions = {"openvino": openvino.__version__, **self._device.versions}

    def load(self, model: Model) -> _OpenVinoEngine:
        return _OpenVinoEngine(self._compiled(model))

    def load_decoder(self, model: Model, form: CacheForm, wrap: Callable[[Engine], Engine]) -> _OpenVinoDecoder:
        if form != "in-place":
            raise BackendError(
                f"backend '{self.name}' takes decoder segments that write into caches, and '{model.file.path}' gives "
                "rows that another must write. Export the bundle again with --dialect opset24."
            )
        return _OpenVinoDecoder(self._compiled(model), wrap)

    def write(self, model: Model, file: Path) -> None:
        """Write the graph as openvino's own format has it, to `file`.xml, and its weights to a file of the same name.

        Its functions are inlined and its caches are states. Raises what `load` raises.
        """
        with self._refusals(model), paths(model):
            self._openvino.serialize(self._reader.read(model), file, file.with_suffix(WEIGHTS))

    def _compiled(self, model: Model) -> _Compiled:
        """The compiled model of a graph, run once: OpenVINO packs matrices when it first runs them, for seconds."""
        with self._refusals(model):
            read = self._reader.read(model)
            if model.weight_bytes and self._device.fills_blocks:
                fill_blocks(self._openvino, read)
            properties = self._device.properties(read, weights=model.weight_bytes > 0)
            inputs, outputs = ([port.any_name for port in ports] for ports in (read.inputs, read.outputs))
            with paths(model):
                library = self._core.compile_model(read, self._device.name, properties)
                if model.weight_bytes:
                    library.create_infer_request().infer(_smallest_inputs(model, inputs))
            return _Compiled(model.graph, library, inputs, outputs)

    @contextmanager
    def _refusals(self, model: Model) -> Iterator[None]:
        """What openvino raises in the block is raised as `BackendError`."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            raise BackendError(f"backend '{self.name}' cannot load '{model.file.path}': {words(error)}.") from error

    def tensor(self, array: Array) -> Array:
        return np.ascontiguousarray(array)

    def numpy(self, tensor: Array) -> Array:
        """`tensor`, which is a host array."""
        return tensor

    def join(self, parts: Sequence[Array], order: Array) -> Array:
        return joined(parts, order)

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed_ms(self, start: float, end: float) -> float:
        return (end - start) * 1e3


@dataclass(frozen=True)
class _Compiled:
    """A compiled model and the graph's own names: the library's may be those of values that it found to be equal."""

    graph: str
    library: Any
    inputs: list[str]
    outputs: list[str]


class _OpenVinoEngine:
    """One compiled model, run by an inference request of its own."""

    def __init__(self, compiled: _Compiled) -> None:
        self._compiled, self._request = compiled, compiled.library.create_infer_request()

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """All outputs by name, in memory of their own; raises `BackendError` where openvino gives up."""
        own = {name: inputs[name] for name in self._compiled.inputs}
        try:
            self._request.infer(dict(enumerate(own.values())), share_inputs=True, share_outputs=True)
        except (RuntimeError, MemoryError) as error:
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in own.items())
            raise BackendError(
                f"graph '{self._compiled.graph}' failed in openvino on {shapes}: {words(error)}. If memory ran out, "
                "end other programs; if not, export the bundle again."
            ) from error
        return {
            name: self._request.get_output_tensor(place).data.copy()
            for place, name in enumerate(self._compiled.outputs)
        }


@dataclass
class _OpenVinoCache(Cache):
    """The keys and values of one segment, of one answer: states of the inference request that `engine` runs."""

    engine: _OpenVinoEngine
    length: int = 0


class _OpenVinoDecoder(Decoder):
    """One compiled segment; every answer has an inference request of its own, with its caches as states."""

    def __init__(self, compiled: _Compiled, wrap: Callable[[Engine], Engine]) -> None:
        self._compiled = compiled
        # One engine is wrapped, for all caches; whose request it runs is not among its inputs.
        self._asked: list[_OpenVinoEngine] = []
        self._engine = wrap(lambda inputs: self._asked[-1](inputs))

    def new_cache(self) -> _OpenVinoCache:
        return _OpenVinoCache(_OpenVinoEngine(self._compiled))

    def __call__(self, inputs: Mapping[str, Array], cache: _OpenVinoCache) -> dict[str, Array]:
        length = np.array([cache.length], np.int64)
        self._asked.append(cache.engine)
        try:
            outputs = self._engine({**inputs, "past_length": length, BEAM: _NO_BEAM})
        finally:
            self._asked.pop()
        cache.length += inputs["hidden"].shape[1]
        return outputs


def _smallest_inputs(model: Model, names: Sequence[str]) -> list[Array]:
    """Zeros for the inputs `names` of a graph, in a shape that it takes and that is soon computed."""
    patches = -(-_PATCHES // model.patches_per_token) * model.patches_per_token
    inputs = {
        tensor.name: np.zeros([_size(size, patches) for size in tensor.shape], tensor.dtype)
        for tensor in model.spec.inputs
    }
    return [_NO_BEAM if name == BEAM else inputs[name] for name in names]


def _size(declared: int | str, patches: int) -> int:
    if isinstance(declared, int):
        return declared
    return patches if declared == "patches" else 1
