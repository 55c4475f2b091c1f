"""One engine beside its ONNX graph: given what the graph was given, it must give what the graph gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.manifest import CacheForm
from sinkprune.contract.precision import Array
from sinkprune.engines.gate.limits import LIMITS, TIE, Limit, kind_of, rounding_of
from sinkprune.engines.gate.measures import deviation, differing
from sinkprune.engines.gate.recording import REFERENCE, Call, Recording
from sinkprune.engines.gate.report import GraphReport, output_report
from sinkprune.runtime.backends import Backend, load_backend
from sinkprune.runtime.backends.compatibility import BuiltEngines
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.kv_cache import cache_names

Run = Callable[[dict[str, Array]], dict[str, Array]]
_DRAWS = 16
_EXACT = Limit(0, 0)


def compare_engine(graph: str, built: BuiltEngines, backend: Backend, recording: Recording) -> GraphReport:
    """Every call that `recording` has of `graph`, made to its engine in `built`, which `backend` loads.

    A choice may fall otherwise where it is a tie (`TIE`): then all that comes out must be what the graph gives on one
    of some inputs that are as good as the same. Raises `BackendError` where the engine does not load or run.
    """
    manifest = built.bundle.manifest
    rounding = rounding_of(graph, manifest, backend.compute)
    run, ties, calls = _loaded(built.model(graph), manifest.cache, backend), _Ties(built.bundle, graph), 0
    found: dict[str, Limit] = {}
    fallen: dict[str, int] = {}
    for calls, call in enumerate(recording.calls(graph), start=1):
        outputs = run(call.inputs)
        apart = _apart(outputs, call.outputs)
        if _chose_otherwise(apart, call.outputs):
            for other in ties.others(call):
                as_good = _apart(outputs, other)
                if not _chose_otherwise(as_good, other):
                    for name in _indices(other):
                        fallen[name] = fallen.get(name, 0) + 1
                    apart = as_good
                    break
        for name, own in apart.items():
            known = found.get(name, _EXACT)
            found[name] = Limit(max(known.typical, own.typical), max(known.worst, own.worst))
    kinds = {tensor.name: "indices" for tensor in manifest.graphs[graph].outputs if tensor.dtype == "int64"}
    outputs_told = {}
    for name, own in found.items():
        limit = _EXACT if name in kinds else LIMITS[rounding][kind_of(name)]
        outputs_told[name] = output_report(kinds.get(name, kind_of(name)), own, limit, fallen.get(name, 0))
    return GraphReport(rounding, calls, outputs_told)


def _loaded(model: Model, form: CacheForm, backend: Backend) -> Run:
    """An engine as a function of host arrays; one of a decoder begins a new cache where there is no past."""
    caches = cache_names(model.spec)
    if not caches:
        engine = backend.load(model)

        def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
            outputs = engine({name: backend.tensor(array) for name, array in inputs.items()})
            return {name: backend.numpy(tensor) for name, tensor in outputs.items()}

        return run
    decoder = backend.load_decoder(model, form, lambda engine: engine)
    cache = decoder.new_cache()

    def decode(inputs: Mapping[str, Array]) -> dict[str, Array]:
        nonlocal cache
        rows = {name: backend.tensor(array) for name, array in inputs.items() if name != "past_length"}
        if not inputs["past_length"][0]:
            cache = decoder.new_cache()
        outputs = decoder(rows, cache)
        return {name: backend.numpy(tensor) for name, tensor in outputs.items() if name not in caches}

    return decode


class _Ties:
    """What the ONNX graph that chooses gives on inputs that are the same but for noise."""

    def __init__(self, bundle: Bundle, graph: str) -> None:
        self._bundle, self._graph = bundle, graph

    def others(self, call: Call) -> Iterator[dict[str, Array]]:
        """Its outputs, draw by draw; none for a graph that does not choose."""
        draw = np.random.default_rng(0)
        for _ in range(_DRAWS if _indices(call.outputs) else 0):
            yield self._run({name: _noisy(array, draw) for name, array in call.inputs.items()})

    @cached_property
    def _run(self) -> Run:
        model = Model.of_bundle(self._bundle, self._graph)
        return _loaded(model, self._bundle.manifest.cache, load_backend(REFERENCE, compute="fp32"))


def _noisy(array: Array, draw: np.random.Generator) -> Array:
    """Each float changed by a share of about `TIE`."""
    if not np.issubdtype(array.dtype, np.floating):
        return array
    return np.asarray(array * (1 + TIE * draw.standard_normal(array.shape)), array.dtype)


def _apart(found: Mapping[str, Array], expected: Mapping[str, Array]) -> dict[str, Limit]:
    """How far each output is from what was expected; one that is missing infinitely."""
    apart = {}
    for name, array in expected.items():
        own = found.get(name, np.empty(0, array.dtype))
        if name in _indices(expected):
            number = differing(own, array)
            apart[name] = Limit(number, number)
        else:
            apart[name] = deviation(kind_of(name), own, array)
    return apart


def _indices(outputs: Mapping[str, Array]) -> Sequence[str]:
    return [name for name, array in outputs.items() if array.dtype == np.int64]


def _chose_otherwise(apart: Mapping[str, Limit], expected: Mapping[str, Array]) -> bool:
    return any(apart[name].worst for name in _indices(expected))
