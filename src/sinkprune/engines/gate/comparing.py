"""One engine beside its ONNX graph: given what the graph was given, it must give what the graph gave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.errors import EnginesError
from sinkprune.contract.manifest import CacheForm
from sinkprune.contract.precision import Array
from sinkprune.engines.gate.limits import EXACT, LIMITS, TIE, kind_of, rounding_of
from sinkprune.engines.gate.measures import differing, errors
from sinkprune.engines.gate.recording import REFERENCE, Call, Recording
from sinkprune.engines.gate.report import GraphReport, output_report
from sinkprune.runtime.backends import Backend, load_backend
from sinkprune.runtime.backends.compatibility import BuiltEngines
from sinkprune.runtime.backends.kv_cache import cache_names
from sinkprune.runtime.backends.models import Model

Run = Callable[[dict[str, Array]], dict[str, Array]]
_DRAWS = 16


def compare_engine(graph: str, built: BuiltEngines, backend: Backend, recording: Recording) -> GraphReport:
    """Every call that `recording` has of `graph`, made to its engine in `built`, which `backend` loads.

    A choice may fall otherwise where it is a tie (`TIE`): then all that comes out must be what the graph gives on one
    of some inputs that are as good as the same. Raises `BackendError` where the engine does not load or run,
    `EnginesError` for one of which nothing was recorded.
    """
    manifest = built.bundle.manifest
    rounding = rounding_of(graph, manifest, backend.compute)
    run, ties = _loaded(built.model(graph), manifest.cache, backend), _Ties(built.bundle, graph)
    found: dict[str, list[Array]] = {}
    fallen: Counter[str] = Counter()
    calls = 0
    for call in recording.calls(graph):
        calls += 1
        outputs = run(call.inputs)
        apart = _apart(outputs, call.outputs)
        if _chose_otherwise(apart, call.outputs):
            as_good = (_apart(outputs, other) for other in ties.others(call))
            tie = next((other for other in as_good if not _chose_otherwise(other, call.outputs)), None)
            if tie is not None:
                apart = tie
                fallen.update(_indices(call.outputs))
        for name, own in apart.items():
            found.setdefault(name, []).append(own)
    if not calls:
        raise EnginesError(
            f"graph '{graph}' was never run on the way to an answer, so nobody knows whether its engine is right. "
            "Export the bundle again."
        )
    chosen = {tensor.name for tensor in manifest.graphs[graph].outputs if tensor.dtype == "int64"}
    reports = {}
    for name, parts in found.items():
        kind, limit = ("indices", EXACT) if name in chosen else (kind_of(name), LIMITS[rounding][kind_of(name)])
        reports[name] = output_report(kind, np.concatenate(parts), limit, fallen[name])
    return GraphReport(rounding, calls, reports)


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


def _apart(found: Mapping[str, Array], expected: Mapping[str, Array]) -> dict[str, Array]:
    """How far each output is from what was expected, by its rows; one that is missing infinitely."""
    chosen = _indices(expected)
    apart = {}
    for name, array in expected.items():
        own = found.get(name, np.empty(0, array.dtype))
        apart[name] = differing(own, array) if name in chosen else errors(kind_of(name), own, array)
    return apart


def _indices(outputs: Mapping[str, Array]) -> Sequence[str]:
    return [name for name, array in outputs.items() if array.dtype == np.int64]


def _chose_otherwise(apart: Mapping[str, Array], expected: Mapping[str, Array]) -> bool:
    return any(apart[name].any() for name in _indices(expected))
