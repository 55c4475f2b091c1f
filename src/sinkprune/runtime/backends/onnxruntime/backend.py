"""ONNX Runtime on a CPU. Tensors are OrtValues."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary, ref

import numpy as np

from sinkprune.contract.checks import install_command
from sinkprune.contract.errors import BackendError
from sinkprune.contract.manifest import CacheForm, TensorSpec
from sinkprune.contract.precision import Array
from sinkprune.runtime.backends import Backend, Decoder, Engine
from sinkprune.runtime.backends.known import KNOWN, Compute
from sinkprune.runtime.backends.kv_cache import BufferedDecoder, CpuMemory, cache_names, joined
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.backends.onnxruntime.library import (
    DTYPES,
    Provider,
    failed,
    import_onnxruntime,
    provider_name,
    session_options,
    session_path,
    share_arena,
    words,
)
from sinkprune.runtime.system import trim_heap, usable_cores

if TYPE_CHECKING:
    from sinkprune.runtime.backends.compatibility import BuiltEngines
    from sinkprune.runtime.backends.small_graphs import GraphWriter

_TOO_NEW = (
    "Unsupported model IR version",
    "is under development and support for this is limited",
    "Could not find an implementation for",
)
"""Errors of onnxruntime for a file, an opset and an operator of a later ONNX."""

_FOLDER = "session.model_external_initializers_file_folder_path"
"""The folder of the weights of an ONNX file that is loaded from memory."""


class OrtBackend(Backend):
    """ONNX Runtime with one execution provider. Calls of engines return when they are done."""

    device = "cpu"
    provider: Provider = "CPUExecutionProvider"

    def __init__(self, name: str, threads: int | None, compute: Compute, library: Any = None) -> None:
        self._ort = ort = library or import_onnxruntime(name)
        available = ort.get_available_providers()
        if provider_name(self.provider) not in available:
            raise BackendError(
                f"backend '{name}' needs {provider_name(self.provider)}, this onnxruntime has {', '.join(available)}."
                f" For CUDA: pip uninstall onnxruntime && {install_command('cuda')}."
            )
        share_arena(ort)
        self.name = name
        self.threads = threads or usable_cores()
        self._rounds_rows = compute == "fastest"
        self.compute = "the graphs' types" + (", int8 where weights are" if self._rounds_rows else "")
        self.cache = "the graphs' type"
        self.versions = {"onnxruntime": ort.__version__}
        self.turn: AbstractContextManager[Any] = nullcontext()
        self._caches = CpuMemory(ort)

    def load(self, model: Model) -> Engine:
        with self.turn:
            session, held = self._open(model, self.provider, {})
        return _OrtEngine(model.graph, session, self.device, held)

    def load_decoder(self, model: Model, form: CacheForm, wrap: Callable[[Engine], Engine]) -> Decoder:
        engine = self._in_place(model) if form == "in-place" else self.load(model)
        return BufferedDecoder(wrap(engine), self._caches, model.spec, form)

    def _in_place(self, model: Model) -> _InPlaceEngine:
        with self.turn:
            session, held = self._open(model, self.provider, {})
        return _InPlaceEngine(self._ort, model, session, held)

    def _open(self, model: Model, provider: Provider, sizes: Mapping[str, int]) -> tuple[Any, list[Any]]:
        """Return a session of one graph, and weights that must live as long as it does.

        `sizes` are constants in the place of dimensions of these names.
        """
        options = session_options(self._ort)
        for name, size in sizes.items():
            options.add_free_dimension_override_by_name(name, size)
        options.intra_op_num_threads = self.threads
        # Every engine has its own threads. They must not spin while those of another engine work.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.add_session_config_entry("session.use_env_allocators", "1")
        # Products with quantised weights: 4 rounds rows to int8, 1 computes in fp32.
        level = "4" if self._rounds_rows else "1"
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", level)
        # Shapes change from call to call: a recorded memory pattern would never fit.
        options.enable_mem_pattern = False
        held = self._hold_small_weights(model, options)
        if model.weights:
            fitted = self._fitted(model)
            with model.by_path() as path:
                if fitted is not None:
                    options.add_session_config_entry(_FOLDER, session_path(path.parent))
                session = self._session(model, fitted or session_path(path), options, provider)
        else:
            # From memory: it may be loaded late, when its file's name may lead to another file.
            session = self._session(model, model.onnx, options, provider)
        if self._reads_files(model):
            session = self._session_in_memory(model, options, provider)
        if provider_name(provider) not in session.get_providers():
            raise BackendError(
                f"backend '{self.name}': {provider_name(provider)} did not start and onnxruntime fell back to "
                f"{', '.join(session.get_providers())}. Check the CUDA and cuDNN libraries it needs."
            )
        if model.weights:
            # Frees the weights as they were before they were packed.
            trim_heap()
        model.check_interface(_specs(session.get_inputs()), _specs(session.get_outputs()))
        return session, held

    def _fitted(self, model: Model) -> bytes | None:
        """Return the ONNX file to load in the place of the graph's own; None for its own."""
        return None

    def _reads_files(self, model: Model) -> bool:
        """Return whether the session that was just made reads the graph's files at each call.

        On some processors onnxruntime does not pack a matrix, and keeps its file mapped.
        """
        return self.device == "cpu" and bool(model.weights) and not model.built and model.is_mapped()

    def _session(self, model: Model, path_or_bytes: str | bytes, options: Any, provider: Provider) -> Any:
        try:
            # The fallback would try the same again, and print on stdout.
            return self._ort.InferenceSession(path_or_bytes, options, providers=[provider], enable_fallback=0)
        except Exception as error:
            # onnxruntime has no common base class for its errors.
            raise BackendError(
                f"backend '{self.name}' cannot load '{model.file.path}': {words(error)}{self._remedy(error)}"
            ) from error

    def _session_in_memory(self, model: Model, options: Any, provider: Provider) -> Any:
        """Return a session with a copy of all weights. It loads more slowly, and takes more memory meanwhile."""
        if not hasattr(options, "add_external_initializers_from_files_in_memory"):
            raise BackendError(
                f"backend '{self.name}': onnxruntime {self._ort.__version__} reads the weights of "
                f"'{model.file.path}' from their file for as long as it runs, on this processor. Install onnxruntime "
                "1.24 or later, which can read them into memory."
            )
        with model.mapped_weights() as files:
            options.add_external_initializers_from_files_in_memory(
                list(files), list(files.values()), [len(data) for data in files.values()]
            )
            return self._session(model, model.onnx, options, provider)

    def _remedy(self, error: Exception) -> str:
        """Return what to do about a graph that is too new. Python 3.10 has no onnxruntime that reads opset24."""
        if not any(sign in str(error) for sign in _TOO_NEW):
            return ""
        return (
            f". This is onnxruntime {self.versions['onnxruntime']}. Install a later one, which may need a later"
            " Python, or export the bundle again with --dialect opset20."
        )

    def _hold_small_weights(self, model: Model, options: Any) -> list[Any]:
        """Copy weights that are no matrices into our own memory, which must live as long as the session.

        On a CPU onnxruntime maps weights from their file. It packs matrices and then releases the file. All other
        weights it keeps reading there, and a truncated file would end the process.
        """
        small = [weight for weight in model.weights if self.device == "cpu" and not weight.multiplied]
        values = [self._ort.OrtValue.ortvalue_from_numpy(model.weight(weight)) for weight in small]
        options.add_external_initializers([weight.name for weight in small], values)
        return values

    def load_small(self, name: str, graph: GraphWriter) -> Engine:
        options = session_options(self._ort)
        options.intra_op_num_threads = self.threads
        session = self._ort.InferenceSession(graph.model(), options, providers=[self.provider], enable_fallback=0)
        return _OrtEngine(name, session, self.device, [])

    def tensor(self, array: Array) -> Any:
        return self._ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array), self.device, 0)

    def numpy(self, tensor: Any) -> Array:
        """Return `tensor` as a host array in its own memory."""
        # OrtValue.numpy() is a view. For a tensor made from an array, it is a view of that array's memory.
        return np.array(tensor.numpy())

    def stack(self, parts: Sequence[Any]) -> Any:
        return self.tensor(np.concatenate([part.numpy() for part in parts]))

    def join(self, parts: Sequence[Any], order: Array, shape: tuple[int, ...] | None = None) -> Any:
        return self.tensor(joined([tensor.numpy() for tensor in parts], order, shape))


class _OrtEngine:
    def __init__(self, graph: str, session: Any, device: str, held: list[Any]) -> None:
        self._graph, self._session, self._held, self._device = graph, session, held, device
        self._inputs = [value.name for value in session.get_inputs()]
        self._outputs = [value.name for value in session.get_outputs()]

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return all outputs by name; they stay on the device. Raises `BackendError` where onnxruntime fails."""
        binding = self._session.io_binding()
        for name in self._inputs:
            binding.bind_ortvalue_input(name, inputs[name])
        for name in self._outputs:
            binding.bind_output(name, self._device)
        _run(self._graph, self._session, binding, inputs)
        return dict(zip(self._outputs, binding.get_outputs(), strict=True))


class _InPlaceEngine:
    """A decoder segment, or all with the head, that writes new rows into the buffers of its caches.

    The outputs with the caches' new content are bound to the buffers of the inputs; otherwise onnxruntime would copy
    all of them. Their binding stays while an answer's buffers do: to bind them again for each token, and to read as
    many outputs, took 3 % of a token's time.
    """

    def __init__(self, onnxruntime: Any, model: Model, session: Any, held: list[Any]) -> None:
        self._ort, self._graph, self._session, self._held = onnxruntime, model.graph, session, held
        self._caches = cache_names(model.spec)
        buffers = set(self._caches.values())
        self._inputs = [tensor for tensor in model.spec.inputs if tensor.name not in buffers]
        self._outputs = [tensor for tensor in model.spec.outputs if tensor.name not in self._caches]
        # By the first of the buffers: a binding, and all that are bound. An answer has its buffers for itself, so no
        # two threads use one binding.
        self._bindings = WeakKeyDictionary[Any, tuple[Any, list[ref[Any]]]]()

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return all outputs by name, in host memory. Raises `BackendError` where onnxruntime fails."""
        results = {name: inputs[own] for name, own in self._caches.items()}
        binding = self._bound(list(results.values()))
        sizes: dict[int | str, int] = {}
        for tensor in self._inputs:
            binding.bind_ortvalue_input(tensor.name, inputs[tensor.name])
            sizes |= zip(tensor.shape, inputs[tensor.name].shape(), strict=True)
        for tensor in self._outputs:
            memory = np.empty([sizes.get(size, size) for size in tensor.shape], tensor.dtype)
            results[tensor.name] = self._ort.OrtValue.ortvalue_from_numpy(memory)
            binding.bind_ortvalue_output(tensor.name, results[tensor.name])
        _run(self._graph, self._session, binding, inputs)
        return results

    def _bound(self, buffers: list[Any]) -> Any:
        """Return a binding of the caches to `buffers`, by their addresses: it must not keep them alive."""
        binding, bound = self._bindings.get(buffers[0], (None, []))
        if binding is not None and all(own is known() for own, known in zip(buffers, bound, strict=True)):
            return binding
        binding = self._session.io_binding()
        for (output, name), own in zip(self._caches.items(), buffers, strict=True):
            place = ("cpu", 0, DTYPES[own.data_type()], own.shape(), own.data_ptr())
            binding.bind_input(name, *place)
            binding.bind_output(output, *place)
        # Only now: Ctrl-C may come at any moment.
        self._bindings[buffers[0]] = binding, list(map(ref, buffers))
        return binding


def _run(graph: str, session: Any, binding: Any, inputs: Mapping[str, Any]) -> None:
    try:
        session.run_with_iobinding(binding)
    except Exception as error:
        shapes = {name: value.shape() for name, value in inputs.items()}
        raise failed(graph, shapes, error) from error


def _specs(values: Sequence[Any]) -> list[TensorSpec]:
    return [
        TensorSpec(
            value.name,
            DTYPES.get(value.type, value.type),
            tuple(size if isinstance(size, int) else str(size) for size in value.shape),
        )
        for value in values
    ]


def open_backend(name: str, threads: int | None, compute: Compute, built: BuiltEngines | None) -> OrtBackend:
    """Open the backend `name` for the engines `built`, if any; raises `BackendError` and `EnginesError`."""
    return opened(OrtBackend, name, threads, compute, built)


B = TypeVar("B", bound=OrtBackend)


def opened(kind: type[B], name: str, threads: int | None, compute: Compute, built: BuiltEngines | None) -> B:
    """Return a backend of this `kind` that fits the engines `built`; raises `BackendError` and `EnginesError`."""
    if built is not None:
        built.check_processor(provider_name(kind.provider))
    backend = kind(name, threads, compute)
    if built is not None:
        libraries = (version for library, version in backend.versions.items() if library != "gpu")
        built.check_library(KNOWN[name].target, "+".join(libraries))
    return backend
