"""OpenVINO for pictures and prompts, and one session of ONNX Runtime for new tokens.

Every session of ONNX Runtime wakes its threads anew, which takes 0.2 ms. With one in the place of four, a token of a
1.1B model takes 0.97 of the time on two cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from sinkprune.contract.errors import EnginesError
from sinkprune.contract.manifest import CacheForm, GraphSpec
from sinkprune.runtime.backends import Cache, Decoder, Engine, TokenDecoder
from sinkprune.runtime.backends.compatibility import BuiltEngines
from sinkprune.runtime.backends.known import TOWER_IN, Compute
from sinkprune.runtime.backends.kv_cache import BufferedCache, SegmentCaches, cache_names
from sinkprune.runtime.backends.models import Model, message_class
from sinkprune.runtime.backends.onnxruntime.backend import OrtBackend
from sinkprune.runtime.backends.openvino.backend import OF_OPENVINO, OrtWithOpenVinoBackend, arrays_of, check_form
from sinkprune.runtime.backends.openvino.graphs import inlined


def open_backend(name: str, threads: int | None, compute: Compute, built: BuiltEngines | None) -> OrtBackend:
    """Open the backend `name`, which takes no engines; raises `BackendError` and `EnginesError`."""
    if built is not None:
        raise EnginesError(
            f"the engines in '{built.engines.path}' hold one form of each decoder segment, backend '{name}' needs "
            "two. Give the bundle, or take --backend ort-cpu+openvino."
        )
    return OpenVinoPrefillBackend(name, threads, compute)


class OpenVinoPrefillBackend(OrtWithOpenVinoBackend):
    """`openvino` for pictures and prompts, `ort-cpu` for new tokens. Both hold the weights of decoder and head."""

    of_openvino = (*OF_OPENVINO, "projector")
    gives_rows = True
    compiles_lengths = joins_segments = True

    def __init__(self, name: str, threads: int | None, compute: Compute) -> None:
        super().__init__(name, threads, compute)
        tokens, _, prompts = self.compute.partition(TOWER_IN)
        self.compute, self.cache = f"{prompts}; tokens in {tokens}", self._openvino.cache

    def load_token_decoder(
        self, models: Iterable[Model], form: CacheForm, wrap: Callable[[Engine], Engine]
    ) -> TokenDecoder:
        parts = tuple(models)
        check_form(self.name, parts[0], form)
        whole = JoinedModel.of("tokens", parts)
        caches = [SegmentCaches(self._caches, part.spec, form) for part in parts[:-1]]
        return _AllSegments(wrap(self._in_place(whole)), whole.inputs_of[:-1], caches)

    def load_decoder(self, model: Model, form: CacheForm, wrap: Callable[[Engine], Engine]) -> Decoder:
        check_form(self.name, model, form)

        def wrapped(engine: Engine) -> Engine:
            # `wrap` may look at tensors, which are those of this backend.
            own = wrap(self._on_ort_values(engine))
            return lambda inputs: own({name: self.tensor(array) for name, array in inputs.items()})

        prompts = self._openvino.load_decoder(model, form, wrapped)
        return _PrefillDecoder(prompts, SegmentCaches(self._caches, model.spec, form))

    def _fitted(self, model: Model) -> bytes | None:
        return model.onnx if isinstance(model, JoinedModel) else None


@dataclass
class _PrefillCache(Cache):
    """The keys and values of one segment, of one answer, in both libraries."""

    of_tokens: BufferedCache
    of_prompt: Any
    """OpenVINO's cache; None after a token, whose row it would lack."""

    @property
    def length(self) -> int:  # type: ignore[override]
        return self.of_tokens.length


class _PrefillDecoder(Decoder):
    """A segment in OpenVINO. Its rows are also stored for ONNX Runtime: reading OpenVINO's states is slow."""

    def __init__(self, prompts: Decoder, caches: SegmentCaches) -> None:
        self._prompts, self._caches = prompts, caches

    def new_cache(self, expected: int = 0) -> _PrefillCache:
        return _PrefillCache(self._caches.new_cache(expected), self._prompts.new_cache())

    def __call__(self, inputs: Mapping[str, Any], cache: _PrefillCache) -> dict[str, Any]:
        rows, own = inputs["hidden"].shape()[1], cache.of_tokens
        if cache.of_prompt is None:
            cache.of_prompt = self._in_openvino(own, own.length, own.length + rows)
        outputs = self._prompts(arrays_of(inputs), cache.of_prompt)
        self._caches.append(outputs, own, rows)
        return outputs

    def keys_and_values(self, cache: _PrefillCache) -> dict[str, Any]:
        return self._caches.keys_and_values(cache.of_tokens)

    def save(self, cache: _PrefillCache, rows: int) -> BufferedCache:
        return self._caches.save(cache.of_tokens, rows)

    def restore(self, saved: BufferedCache, rows: int, length: int, expected: int = 0) -> _PrefillCache:
        own = self._caches.restore(saved, rows, length, expected)
        return _PrefillCache(own, self._in_openvino(saved, rows, length))

    def _in_openvino(self, cache: BufferedCache, rows: int, length: int) -> Any:
        states = {name.removeprefix("past_"): array for name, array in arrays_of(cache.buffers).items()}
        return self._prompts.restore(states, rows, length)


class _AllSegments(TokenDecoder):
    """All segments and the head as one session of ONNX Runtime."""

    def __init__(
        self, engine: Engine, inputs_of: Sequence[Mapping[str, str]], caches: Sequence[SegmentCaches]
    ) -> None:
        """Give `engine` its inputs by the names `inputs_of` each segment's own."""
        self._engine, self._inputs_of, self._caches = engine, inputs_of, caches

    def __call__(self, inputs: Sequence[Mapping[str, Any]], caches: Sequence[_PrefillCache]) -> Any:
        given = dict[str, Any]()
        for names, own, segment, cache in zip(self._inputs_of, inputs, self._caches, caches, strict=True):
            cache.of_prompt = None
            of_segment = {**own, **segment.inputs(cache.of_tokens, 1)}
            given |= {names[name]: tensor for name, tensor in of_segment.items()}
        logits = self._engine(given)["logits"]
        for cache in caches:
            cache.of_tokens.length += 1
        return logits


@dataclass(frozen=True)
class JoinedModel(Model):
    """Graphs of one bundle and dialect, each of which takes the `hidden_out` of the one before as its `hidden`.

    Caches and the last graph's outputs keep their names. All other names begin with that of their graph.
    """

    parts: tuple[Model, ...] = ()

    @classmethod
    def of(cls, name: str, parts: Sequence[Model]) -> JoinedModel:
        """Return `parts` as one graph of this `name`."""
        first, last = parts[0], parts[-1]
        inputs = [
            replace(tensor, name=own(tensor.name))
            for part, own in _renamed(parts)
            for tensor in part.spec.inputs
            if part is first or tensor.name != "hidden"
        ]
        caches = [tensor for part in parts for tensor in part.spec.outputs if tensor.name in cache_names(part.spec)]
        spec = GraphSpec(first.spec.file, tuple(inputs), (*caches, *last.spec.outputs))
        weight_bytes = sum(part.weight_bytes for part in parts)
        return cls(name, spec, first.name, first.folder, weight_bytes, parts=tuple(parts))

    @cached_property
    def inputs_of(self) -> list[dict[str, str]]:
        """The inputs of each part, by their own names: their names here."""
        return [{tensor.name: own(tensor.name) for tensor in part.spec.inputs} for part, own in _renamed(self.parts)]

    def _read(self) -> bytes:
        whole = message_class("Model")()
        names = [{tensor.name for tensor in tensors} for tensors in (self.spec.inputs, self.spec.outputs)]
        for part, own in _renamed(self.parts):
            model = message_class("Model").FromString(inlined(part.onnx))
            graph = model.graph
            for node in graph.node:
                node.name = own(node.name)
                node.input[:] = map(own, node.input)
                node.output[:] = map(own, node.output)
            for named in (*graph.initializer, *graph.input, *graph.output):
                named.name = own(named.name)
            for value in (*graph.input, *graph.output):
                for size in value.type.tensor_type.shape.dim:
                    if size.dim_param:
                        # Segments have caches of different lengths.
                        size.dim_param = own(size.dim_param)
            whole.graph.node.extend(graph.node)
            whole.graph.initializer.extend(graph.initializer)
            whole.graph.input.extend(value for value in graph.input if value.name in names[0])
            whole.graph.output.extend(value for value in graph.output if value.name in names[1])
        whole.graph.name, whole.ir_version = self.graph, model.ir_version
        whole.opset_import.extend(model.opset_import)
        return bytes(whole.SerializeToString())


def _renamed(parts: Sequence[Model]) -> Iterator[tuple[Model, Callable[[str], str]]]:
    """Yield each part with a function from names in its graph to names in the whole."""
    hidden = "hidden"
    for part in parts:
        kept = {name for pair in cache_names(part.spec).items() for name in pair}
        if part is parts[-1]:
            kept.update(tensor.name for tensor in part.spec.outputs)
        yield part, partial(_new_name, part.graph, kept, hidden)
        hidden = f"{part.graph}/hidden_out"


def _new_name(graph: str, kept: set[str], hidden: str, name: str) -> str:
    if name == "hidden":
        return hidden
    # An input that an operator does without has no name.
    return name if name in kept or not name else f"{graph}/{name}"
