"""OpenVINO: its import, its devices, and its backends, alone and with ONNX Runtime's decoder.

Selection is always computed in fp32, and everything else in the type `compute`.

OpenVINO is faster on many rows, as a vision tower has. ONNX Runtime is faster on the single row of a token, with int4
weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from sinkprune.contract.budgets import OTHER_TOWERS, TOWER
from sinkprune.contract.checks import install_command
from sinkprune.contract.errors import BackendError
from sinkprune.contract.manifest import ACTION_HEAD, CacheForm
from sinkprune.contract.memory import available_bytes
from sinkprune.contract.precision import Array
from sinkprune.runtime.backends import Backend, Cache, Decoder, Engine
from sinkprune.runtime.backends.compatibility import BuiltEngines
from sinkprune.runtime.backends.known import TOWER_IN, Compute
from sinkprune.runtime.backends.kv_cache import joined
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.backends.onnxruntime.backend import OrtBackend, opened
from sinkprune.runtime.backends.openvino.graphs import BEAM, WEIGHTS, fill_blocks, group_in_int8, paths, reader_of
from sinkprune.runtime.device.turns import Turns
from sinkprune.runtime.system import bound_cores, usable_cores

# Importing this module writes an identifier to the home directory, and reports the import to the vendor.
_REPORTS = "openvino.tools.ovc"
_LONGEST = 300


def import_openvino(name: str) -> Any:
    """Import the library, for the backend or target `name`; raises `BackendError`.

    A robot must not report to anybody. So openvino's model converter, which does, is hidden from the import. If other
    code imported openvino earlier, it has already reported.
    """
    known = _REPORTS in sys.modules
    if not known:
        sys.modules[_REPORTS] = None  # type: ignore[assignment]
    try:
        import openvino
        import openvino.frontend.onnx
        import openvino.op.util
        import openvino.opset15
    except ImportError as error:
        raise BackendError(
            f"'{name}' needs openvino, and its import failed: {error}. "
            f"Install it with: {install_command('openvino')}. Or take --backend ort-cpu."
        ) from error
    finally:
        if not known:
            del sys.modules[_REPORTS]
    return openvino


def words(error: Exception) -> str:
    """Return openvino's message in one line, without its final full stop and without places in openvino's code."""
    lines = [line.strip() for line in str(error).splitlines()]
    message = " ".join(line for line in lines if line and not line.startswith("Exception from"))
    return (message or " ".join(lines))[:_LONGEST].removesuffix(".")


_NAME = "FULL_DEVICE_NAME"
_INT8 = "int8 where openvino finds it faster"
_KERNELS = 100
"""For how many shapes OpenVINO keeps kernels, for each kind of operator of a graph.

Its default is 5000. Then a process grows by megabytes with each new number of rows.
"""


class Cpu:
    """The processor: bf16 where it has it, and activations rounded to int8 for int8 and int4 weights.

    With AMX, activations stay bf16, because OpenVINO does not round them there, and rows fill whole blocks.
    """

    name = "CPU"

    def __init__(self, core: Any, backend: str, threads: int | None, compute: Compute) -> None:
        """Raises `BackendError` for the `compute` bf16 on a processor without bf16."""
        has_bf16 = "BF16" in core.get_property(self.name, "OPTIMIZATION_CAPABILITIES")
        if compute == "bf16" and not has_bf16:
            raise BackendError(
                f"backend '{backend}' was to compute in bf16, which this processor lacks: "
                f"{core.get_property(self.name, _NAME)}. Leave --compute out for the fastest it has."
            )
        self.threads = threads or usable_cores()
        self.cache = "bf16" if has_bf16 and compute != "fp32" else "fp32"
        self._int8 = compute == "fastest"
        self.compute = self.cache + (f", {_INT8}" if self._int8 else "")
        self.versions: dict[str, str] = {}
        # Whether incomplete blocks of rows take longer than full ones.
        self.fills_blocks = self.cache == "bf16" and _has_amx(import_openvino(backend), core)

    def properties(self, read: Any, *, weights: bool) -> dict[str, Any]:
        """Return the properties to compile the model `read` with; a model without `weights` selects tokens."""
        precision = "bf16" if weights and self.cache == "bf16" else "f32"
        return {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
            "INFERENCE_NUM_THREADS": self.threads,
            # OpenVINO pins threads to the first cores, the caller's too: programs of few threads would share those.
            "ENABLE_CPU_PINNING": self.threads >= bound_cores(),
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": group_in_int8(read) if self._int8 else 0,
            "CPU_RUNTIME_CACHE_CAPACITY": _KERNELS,
        }


class Gpu:
    """The first Intel GPU, integrated or discrete: fp16, unless `compute` is fp32."""

    name = "GPU"
    threads = 1
    """The thread that enqueues work."""
    fills_blocks = False

    def __init__(self, core: Any, backend: str, threads: int | None, compute: Compute) -> None:
        """Raises `BackendError` without a GPU or its driver."""
        try:
            self.versions = {"gpu": core.get_property(self.name, _NAME)}
        except RuntimeError as error:
            raise BackendError(
                f"backend '{backend}' needs a GPU of Intel, and openvino finds none here, only "
                f"{', '.join(core.available_devices)}. Install the GPU's OpenCL driver (Debian, Ubuntu: apt install "
                "intel-opencl-icd) and add this user to the group 'render', or take --backend openvino."
            ) from error
        self._core, self._fp32 = core, compute == "fp32"
        self.cache = "fp32" if self._fp32 else "fp16"
        self.compute = "fp32" if self._fp32 else f"fp16, {_INT8}"

    def properties(self, read: Any, *, weights: bool) -> dict[str, Any]:
        precision = "f16" if weights and not self._fp32 else "f32"
        return {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            **({"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0} if self._fp32 else {}),
        }

    def free_bytes(self) -> int:
        """Return the bytes of free memory; 0 for a discrete GPU, of which openvino reports the total only."""
        try:
            integrated = str(self._core.get_property(self.name, "DEVICE_TYPE")) == "Type.INTEGRATED"
        except RuntimeError:
            return 0
        return available_bytes() if integrated else 0


def _has_amx(openvino: Any, core: Any) -> bool:
    """Return whether openvino multiplies with AMX here. No property shows it, so compile a small product."""
    ops = openvino.opset15
    rows = ops.parameter([2, 64], np.float32)
    product = ops.matmul(rows, ops.constant(np.ones((64, 64), np.float32)), False, False)
    try:
        compiled = core.compile_model(
            openvino.Model([product], [rows]), Cpu.name, {"INFERENCE_PRECISION_HINT": "bf16"}
        )
    except RuntimeError:
        # OpenVINO claims bf16 and cannot compute in it. Loading the first graph raises the reason.
        return False
    kernels = [node.get_rt_info()["primitiveType"].astype(str) for node in compiled.get_runtime_model().get_ops()]
    return any("amx" in kernel for kernel in kernels)


DEVICES: dict[str, type[Cpu | Gpu]] = {"openvino": Cpu, "openvino-gpu": Gpu}
"""By the name of the backend that computes there."""

_NO_BEAM = np.zeros(1, np.int32)
# The first run has at least so many patches, in whole visual tokens.
_PATCHES = 64


def open_backend(name: str, threads: int | None, compute: Compute, built: BuiltEngines | None) -> OpenVinoBackend:
    """Open the backend `name` for the engines `built`, if any; raises `BackendError` and `EnginesError`."""
    backend = OpenVinoBackend(name, threads, compute)
    if built is not None:
        built.check_library("openvino", backend.versions["openvino"])
    return backend


def check_form(backend: str, model: Model, form: CacheForm) -> None:
    """Raise `BackendError` unless the decoder segment writes into its caches, which become OpenVINO's states."""
    if form != "in-place":
        raise BackendError(
            f"backend '{backend}' takes decoder segments that write into caches, and '{model.file.path}' gives rows "
            "that another must write. Export the bundle again with --dialect opset24."
        )


class OpenVinoBackend(Backend):
    """OpenVINO on one of `DEVICES`. Calls of engines return when they are done."""

    def __init__(self, name: str, threads: int | None, compute: Compute, *, gives_rows: bool = False) -> None:
        """With `gives_rows`, decoder segments also return the new rows of their caches.

        Raises `BackendError` where openvino or the device is missing, or lacks the type `compute`.
        """
        openvino = import_openvino(name)
        self._openvino, self._reader, self._gives_rows = openvino, reader_of(openvino), gives_rows
        self.turn = Turns()
        self.compiles_lengths = True
        self._device = DEVICES[name](self._reader.core, name, threads, compute)
        self.name = name
        self.threads, self.compute, self.cache = self._device.threads, self._device.compute, self._device.cache
        self.versions = {"openvino": openvino.__version__, **self._device.versions}

    def load(self, model: Model) -> Engine:
        return self._compiled(model)()

    def load_decoder(self, model: Model, form: CacheForm, wrap: Callable[[Engine], Engine]) -> Decoder:
        check_form(self.name, model, form)
        return _OpenVinoDecoder(self._compiled(model), wrap)

    def write(self, model: Model, file: Path) -> None:
        """Write the graph in openvino's own format to `file`, and its weights to a file of the same name.

        Functions are inlined, and caches are states. Raises what `load` raises.
        """
        with self._refusals(model), paths(model):
            self._openvino.serialize(self._read(model), file, file.with_suffix(WEIGHTS))

    def _read(self, model: Model) -> Any:
        return self._reader.read(model, gives_rows=self._gives_rows)

    def _compiled(self, model: Model) -> Callable[[], _OpenVinoEngine]:
        """Compile a graph, and run it once: OpenVINO packs matrices in their first run, which takes seconds."""
        with self._refusals(model):
            read = self._read(model)
            if model.weight_bytes and self._device.fills_blocks:
                fill_blocks(self._openvino, read)
            properties = self._device.properties(read, weights=model.weight_bytes > 0)
            inputs, outputs = ([port.any_name for port in ports] for ports in (read.inputs, read.outputs))
            with paths(model):
                library = self._reader.core.compile_model(read, self._device.name, properties)
                if model.weight_bytes:
                    library.create_infer_request().infer(_smallest_inputs(model, inputs))
            return lambda: _OpenVinoEngine(model.graph, library, inputs, outputs)

    @contextmanager
    def _refusals(self, model: Model) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            raise BackendError(f"backend '{self.name}' cannot load '{model.file.path}': {words(error)}.") from error

    def tensor(self, array: Array) -> Array:
        return np.ascontiguousarray(array)

    def numpy(self, tensor: Array) -> Array:
        return tensor

    def join(self, parts: Sequence[Array], order: Array, shape: tuple[int, ...] | None = None) -> Array:
        return joined(parts, order, shape)


class _OpenVinoEngine(Cache):
    """An inference request. That of a decoder segment holds the keys and values of one answer as its states."""

    def __init__(self, graph: str, library: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        """Take the graph's own names: OpenVINO may use the names of equal values instead."""
        self._graph, self._inputs, self._outputs = graph, inputs, outputs
        self._request = library.create_infer_request()
        self.length = 0

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return all outputs by name, in their own memory; raises `BackendError` where openvino fails."""
        own = {name: inputs[name] for name in self._inputs}
        try:
            self._request.infer(dict(enumerate(own.values())), share_inputs=True, share_outputs=True)
        except (RuntimeError, MemoryError) as error:
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in own.items())
            raise BackendError(
                f"graph '{self._graph}' failed in openvino on {shapes}: {words(error)}. If memory ran out, "
                "end other programs; if not, export the bundle again."
            ) from error
        return {name: self._request.get_output_tensor(place).data.copy() for place, name in enumerate(self._outputs)}

    def states(self) -> dict[str, Array]:
        """Return the states of the inference request by name: keys and values [1,Hkv,R,h]."""
        return {state.name: state.state.data for state in self._request.query_state()}

    def set_states(self, states: Mapping[str, Array]) -> None:
        """Set the states of the inference request, by name."""
        for state in self._request.query_state():
            state.state = type(state.state)(np.ascontiguousarray(states[state.name]))


class _OpenVinoDecoder(Decoder):
    """One compiled segment; every answer has its own inference request, with its caches as states."""

    def __init__(self, new_engine: Callable[[], _OpenVinoEngine], wrap: Callable[[Engine], Engine]) -> None:
        self._new_engine = new_engine
        # One engine is wrapped for all caches. It runs the request of the cache in use, the last of these. If it held
        # this object, the model would stay in memory until Python's garbage collector runs.
        self._in_use = in_use = list[_OpenVinoEngine]()
        self._engine = wrap(lambda inputs: in_use[-1](inputs))

    def new_cache(self, expected: int = 0) -> _OpenVinoEngine:
        return self._new_engine()

    def __call__(self, inputs: Mapping[str, Array], cache: _OpenVinoEngine) -> dict[str, Array]:
        length = np.array([cache.length], np.int64)
        self._in_use.append(cache)
        try:
            outputs = self._engine({**inputs, "past_length": length, BEAM: _NO_BEAM})
        finally:
            self._in_use.pop()
        cache.length += inputs["hidden"].shape[1]
        return outputs

    def keys_and_values(self, cache: _OpenVinoEngine) -> dict[str, Array]:
        return {f"past_{name}": state for name, state in cache.states().items()}

    def save(self, cache: _OpenVinoEngine, rows: int) -> dict[str, Array]:
        return {name: state[:, :, :rows].copy() for name, state in cache.states().items()}

    def restore(self, saved: dict[str, Array], rows: int, length: int, expected: int = 0) -> _OpenVinoEngine:
        cache = self.new_cache()
        cache.set_states({name: state[:, :, :rows] for name, state in saved.items()})
        cache.length = rows
        return cache


def _smallest_inputs(model: Model, names: Sequence[str]) -> list[Array]:
    # After a run of a tower on one token, OpenVINO 2026.4 computes other numbers of tokens wrongly.
    sizes = {"patches": -(-_PATCHES // model.patches_per_token) * model.patches_per_token, "N": 2}
    if model.graph == ACTION_HEAD:
        # It reads a row for each number of the chunk, and the rows end with two others.
        sizes["S"] = prod(map(int, model.spec.outputs[0].shape)) + 2
    inputs: dict[str, Array] = {BEAM: _NO_BEAM}
    for tensor in model.spec.inputs:
        shape = [size if isinstance(size, int) else sizes.get(size, 1) for size in tensor.shape]
        inputs[tensor.name] = np.zeros(shape, tensor.dtype)
    return [inputs[name] for name in names]


def open_with_onnxruntime(name: str, threads: int | None, compute: Compute, built: BuiltEngines | None) -> OrtBackend:
    """Open the backend `name` for the engines `built`, if any; raises `BackendError` and `EnginesError`."""
    return opened(OrtWithOpenVinoBackend, name, threads, compute, built)


OF_OPENVINO = (TOWER, *OTHER_TOWERS.values())
"""The graphs of engines for both libraries that run on OpenVINO."""


class OrtWithOpenVinoBackend(OrtBackend):
    """`ort-cpu`, with the graphs `of_openvino` on `openvino`. Tensors are OrtValues."""

    of_openvino: tuple[str, ...] = OF_OPENVINO
    gives_rows = False
    """Whether OpenVINO's decoder segments also return the new rows of their caches."""

    def __init__(self, name: str, threads: int | None, compute: Compute) -> None:
        """Raises `BackendError` where one of the libraries is missing."""
        super().__init__(name, threads, compute)
        # Imported here, so that an error names this backend.
        import_openvino(name)
        self._openvino = OpenVinoBackend("openvino", threads, compute, gives_rows=self.gives_rows)
        self.compute = f"{self.compute}{TOWER_IN}{self._openvino.compute}"
        self.versions |= self._openvino.versions
        self.turn = self._openvino.turn

    def load(self, model: Model) -> Engine:
        if model.graph not in self.of_openvino:
            return super().load(model)
        return self._on_ort_values(self._openvino.load(model))

    def _on_ort_values(self, engine: Engine) -> Engine:
        """Wrap OpenVINO's `engine`, which takes and returns arrays, for tensors of this backend."""

        def run(inputs: Mapping[str, Any]) -> dict[str, Any]:
            return {name: self.tensor(array) for name, array in engine(arrays_of(inputs)).items()}

        return run


def arrays_of(tensors: Mapping[str, Any]) -> dict[str, Array]:
    """Return OrtValues as arrays for OpenVINO. They are views, which are valid as long as the OrtValues are."""
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    # Two C types are int64, and openvino does not accept the one that onnxruntime returns.
    return {name: array.view(array.dtype.name) for name, array in arrays.items()}
