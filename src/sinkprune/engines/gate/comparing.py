"""Compares engines with ONNX graphs: each engine on the recorded inputs of its graph, and the answers of all.

Differences are measured row by row: no outlier hides the other rows, and a sink is much longer than they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.errors import EnginesError
from sinkprune.contract.manifest import CacheForm
from sinkprune.contract.precision import Array
from sinkprune.engines.gate.limits import EXACT, LIMITS, TIE, Kind, Rounding, gap_limit, kind_of, rounding_of
from sinkprune.engines.gate.question import Question
from sinkprune.engines.gate.recording import REFERENCE, Call, Recording, Said, ask
from sinkprune.engines.gate.report import GraphReport, TextReport, output_report
from sinkprune.runtime.backends import Backend, load_backend
from sinkprune.runtime.backends.compatibility import BuiltEngines
from sinkprune.runtime.backends.kv_cache import cache_names
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.pipeline import Pipeline

Run = Callable[[dict[str, Array]], dict[str, Array]]
_DRAWS = 16
# Rows that are much smaller than the others are compared with those: rounding alone may change all of a small row.
_FLOOR = 0.1


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


def compare_texts(
    pipeline: Pipeline, question: Question, recording: Recording, rounding: Rounding
) -> list[TextReport]:
    """Each answer of `recording` beside what `pipeline`, which loaded the engines, says to the same `question`.

    Where two part, both tokens must have been nearly as likely by the graphs: see `gap_limit`. Raises what asking
    raises.
    """
    reports = []
    for number, expected in enumerate(recording.answers):
        found, _ = ask(pipeline, question, expected.method, expected.budget)
        same = next(
            (
                place
                for place, tokens in enumerate(zip(found.token_ids, expected.token_ids, strict=True))
                if tokens[0] != tokens[1]
            ),
            len(expected.token_ids),
        )
        gap = 0.0
        if same < len(expected.token_ids):
            logits = recording.logits(number)[same].astype(np.float64)
            gap = float((logits[expected.token_ids[same]] - logits[found.token_ids[same]]) / logits.std())
        alike = _alike(found, expected)
        limit = gap_limit(rounding, alike)
        reports.append(
            TextReport(
                method=expected.method,
                budget=expected.budget,
                expected=expected.text,
                found=found.text,
                tokens=len(expected.token_ids),
                same_tokens=same,
                gap=gap,
                gap_limit=limit,
                kept_alike=alike,
                passed=limit is None or gap <= limit,
            )
        )
    return reports


def _alike(found: Said, expected: Said) -> float:
    """The smallest share of the tokens of a step that are the same."""
    return min(len(set(own) & set(other)) / len(other) for own, other in zip(found.kept, expected.kept, strict=True))


def errors(kind: Kind, found: Array, expected: Array) -> Array:
    """[rows] fp64: how much each row differs, relatively; infinite for what is not finite or of another shape.

    Of a row that is the length of the difference over that of what was expected, of a value the same, and of a logit
    the difference over the root mean square of all. Attention's [1,H,S,h] has S rows.
    """
    if found.shape != expected.shape or not np.isfinite(found).all():
        return np.array([np.inf])
    exact, apart = _rows(kind, expected), _rows(kind, found) - _rows(kind, expected)
    lengths = np.linalg.norm(exact, axis=-1)
    if not lengths.size:
        return lengths
    if kind == "logits":
        floor = np.full_like(lengths, np.sqrt(np.mean(np.square(exact))))
    else:
        floor = np.maximum(lengths, _FLOOR * np.median(lengths))
    result: Array = np.linalg.norm(apart, axis=-1) / np.maximum(floor, np.finfo(np.float64).tiny)
    return result


def differing(found: Array, expected: Array) -> Array:
    """[1]: how many of the indices `expected` are others in `found`; all of them where there are more or fewer."""
    alike = found.shape == expected.shape
    return np.array([(found != expected).sum() if alike else max(found.size, expected.size, 1)], np.float64)


def _rows(kind: Kind, array: Array) -> Array:
    """[rows,width] fp64."""
    exact = array.astype(np.float64)
    if kind != "rows":
        return exact.reshape(-1, 1)
    if exact.ndim == 4:
        exact = exact.transpose(0, 2, 1, 3).reshape(-1, exact.shape[1] * exact.shape[3])
    return exact.reshape(-1, exact.shape[-1])
