"""OpenVINO for pictures and prompts, and one session of ONNX Runtime for new tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sinkprune.contract.errors import EnginesError
from sinkprune.contract.manifest import CacheForm
from sinkprune.runtime.backends import Cache, Decoder, Engine, TokenDecoder
from sinkprune.runtime.backends.compatibility import BuiltEngines
from sinkprune.runtime.backends.known import TOWER_IN, Compute
from sinkprune.runtime.backends.kv_cache import BufferedCache, SegmentCaches
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.backends.onnxruntime.backend import OrtBackend
from sinkprune.runtime.backends.openvino.backend import OF_OPENVINO, OrtWithOpenVinoBackend, arrays_of
from sinkprune.runtime.backends.openvino.joined import JoinedModel


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
    compiles_lengths = True

    def __init__(self, name: str, threads: int | None, compute: Compute) -> None:
        super().__init__(name, threads, compute)
        tokens, _, prompts = self.compute.partition(TOWER_IN)
        self.compute, self.cache = f"{prompts}; tokens in {tokens}", self._openvino.cache

    def load_token_decoder(
        self, models: Iterable[Model], form: CacheForm, wrap: Callable[[Engine], Engine]
    ) -> TokenDecoder | None:
        if form != "in-place":
            # What `load_decoder` rejects.
            return None
        parts = tuple(models)
        whole = JoinedModel.of("tokens", parts)
        caches = [SegmentCaches(self._caches, part.spec, form) for part in parts[:-1]]
        return _AllSegments(wrap(self._in_place(whole)), whole.inputs_of, caches)

    def load_decoder(self, model: Model, form: CacheForm, wrap: Callable[[Engine], Engine]) -> Decoder:
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
        for names, own, segment, cache in zip(self._inputs_of, inputs, self._caches, caches, strict=False):
            cache.of_prompt = None
            of_segment = {**own, **segment.inputs(cache.of_tokens, 1)}
            given |= {names[name]: tensor for name, tensor in of_segment.items()}
        logits = self._engine(given)["logits"]
        for cache in caches:
            cache.of_tokens.length += 1
        return logits
