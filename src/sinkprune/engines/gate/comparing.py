"""Compares engines with the graphs they were built from, tensor by tensor and token by token.

Each row of an output has its own difference, so that a sink, which is much longer than other rows, hides none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from sinkprune.contract.budgets import is_tower
from sinkprune.contract.bundle import Bundle, read_runnable
from sinkprune.contract.engines_manifest import ANY_SHAPE, CHECKED, Target
from sinkprune.contract.errors import EnginesError
from sinkprune.contract.files.trust import ANY, Trust
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.precision import Array
from sinkprune.engines.gate.recording import (
    REFERENCE,
    Act,
    GateAnswer,
    GateChunk,
    GateQuestion,
    Recording,
    answer_question,
    load_act,
    record,
)
from sinkprune.engines.gate.report import (
    CHUNKS,
    GAPS,
    ROUNDINGS,
    TIE,
    ChunkReport,
    GateReport,
    GraphReport,
    OutputKind,
    Rounding,
    TextReport,
    kind_of,
    limit_of,
    output_report,
    refusal,
    refusals_together,
    rounding_of,
)
from sinkprune.engines.progress import SILENT, BuildProgress
from sinkprune.runtime.backends import Backend, Engine, Tensor, load_backend
from sinkprune.runtime.backends.compatibility import BuiltEngines, own_engines
from sinkprune.runtime.backends.known import backend_of
from sinkprune.runtime.backends.kv_cache import cache_names
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.device.cuda import open_device
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.steps.chain import Wrap

Run = Callable[[Mapping[str, Array]], dict[str, Array]]
_NOISY_RUNS = 16
# Rows below this share of the median row are compared with that share: rounding alone may change a small row.
_FLOOR = 0.1


def compare_engine(graph: str, built: BuiltEngines, backend: Backend, recording: Recording) -> GraphReport:
    """Compare the engine of `graph` with every call that `recording` has of the graph.

    If the engine selects other tokens, the graph runs on inputs with noise (`TIE`). If such a run selects the same
    tokens as the engine, the choice is a tie, and all outputs must match that run. Raises `BackendError` if the
    engine does not load or run, and `EnginesError` if nothing was recorded of the graph.
    """
    manifest = built.bundle.manifest
    kinds = {tensor.name: kind_of(tensor) for tensor in manifest.graphs[graph].outputs}
    run = _load(built.model(graph), manifest, backend)
    differences: dict[str, list[Array]] = {}
    calls = ties = 0
    for call in recording.calls(graph):
        calls += 1
        outputs = run(call.inputs)
        found = _differences(kinds, outputs, call.outputs)
        if _selects_otherwise(kinds, found):
            noisy = (_differences(kinds, outputs, own) for own in _noisy_runs(built.bundle, graph, call.inputs))
            tie = next((own for own in noisy if not _selects_otherwise(kinds, own)), None)
            if tie is not None:
                found = tie
                ties += 1
        for name, rows in found.items():
            differences.setdefault(name, []).append(rows)
    if not calls:
        raise EnginesError(
            f"graph '{graph}' was never run on the way to an answer, so its engine cannot be compared. "
            "Export the bundle again."
        )
    rounding = rounding_of(graph, manifest, backend.compute)
    reports = {
        name: output_report(kinds[name], np.concatenate(parts), rounding, ties) for name, parts in differences.items()
    }
    return GraphReport(rounding, calls, reports)


def _load(model: Model, manifest: Manifest, backend: Backend) -> Run:
    """Load a graph or an engine as a function of host arrays. A decoder starts a new cache if there is no past.

    In a policy a decoder also returns the rows of its cache, by the names of the graph's outputs.
    """
    caches = cache_names(model.spec)
    if not caches:
        engine = backend.load(model)

        def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
            outputs = engine({name: backend.tensor(array) for name, array in inputs.items()})
            return {name: backend.numpy(tensor) for name, tensor in outputs.items()}

        return run
    decoder = backend.load_decoder(model, manifest.cache, lambda engine: engine)
    cache = decoder.new_cache()

    def decode(inputs: Mapping[str, Array]) -> dict[str, Array]:
        nonlocal cache
        rows = {name: backend.tensor(array) for name, array in inputs.items() if name != "past_length"}
        if not inputs["past_length"][0]:
            cache = decoder.new_cache()
        outputs = decoder(rows, cache)
        found = {name: backend.numpy(tensor) for name, tensor in outputs.items() if name not in caches}
        if manifest.reads_caches:
            held = decoder.keys_and_values(cache)
            found |= {name: backend.numpy(held[past])[:, :, : cache.length] for name, past in caches.items()}
        return found

    return decode


def _noisy_runs(bundle: Bundle, graph: str, inputs: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
    """Run a graph that selects on `inputs` with relative noise of `TIE`, and yield the outputs of each run."""
    run = _load(Model.of_bundle(bundle, graph), bundle.manifest, load_backend(REFERENCE, compute="fp32"))
    draw = np.random.default_rng(0)
    floats = [name for name, array in inputs.items() if np.issubdtype(array.dtype, np.floating)]
    for _ in range(_NOISY_RUNS):
        noise = {name: 1 + TIE * draw.standard_normal(inputs[name].shape) for name in floats}
        yield run({**inputs, **{name: (inputs[name] * noise[name]).astype(inputs[name].dtype) for name in floats}})


def _differences(
    kinds: Mapping[str, OutputKind], found: Mapping[str, Array], expected: Mapping[str, Array]
) -> dict[str, Array]:
    missing = np.empty(0)
    return {name: row_differences(kinds[name], found.get(name, missing), array) for name, array in expected.items()}


def _selects_otherwise(kinds: Mapping[str, OutputKind], differences: Mapping[str, Array]) -> bool:
    return any(own.any() for name, own in differences.items() if kinds[name] == "indices")


def compare_texts(
    pipeline: Pipeline, recording: Recording, rounding: Rounding, on_token: Callable[[], None] = lambda: None
) -> list[TextReport]:
    """Compare each answer of `recording` with that of `pipeline`, which loaded the engines, to the same question.

    `on_token` is called after each token of `pipeline`. Where two texts part, the graphs must find both tokens nearly
    as likely: see `gap_limit`. Raises what `Pipeline.generate` raises.
    """
    reports = []
    for number, expected in enumerate(recording.answers):
        found, _ = answer_question(pipeline, recording.question, expected.method, expected.budget, on_token)
        equal = np.equal(found.token_ids, expected.token_ids)
        same, gap = len(equal), 0.0
        if not equal.all():
            same = int(equal.argmin())
            logits = recording.logits(number)[same].astype(np.float64)
            gap = float((logits[expected.token_ids[same]] - logits[found.token_ids[same]]) / logits.std())
        alike = kept_alike(found, expected)
        limit = GAPS[rounding] if alike == 1 else None
        reports.append(
            TextReport(
                method=expected.method,
                budget=expected.budget,
                expected=expected.text,
                found=found.text,
                tokens=len(equal),
                same_tokens=same,
                gap=gap,
                gap_limit=limit,
                kept_alike=alike,
                passed=limit is None or gap <= limit,
            )
        )
    return reports


def compare_chunks(
    act: Act, recording: Recording, rounding: Rounding, on_chunk: Callable[[], None] = lambda: None
) -> list[ChunkReport]:
    """Compare each chunk of `recording` with that of `act`, which runs the engines.

    `on_chunk` is called after each chunk of `act`. Raises what `Policy.act` raises.
    """
    reports = []
    for expected in recording.chunks:
        found = act(recording.question, expected.method, expected.budget)
        differences = chunk_differences(found, expected)
        alike, worst = kept_alike(found, expected), float(differences.max())
        limit = CHUNKS[rounding] if alike == 1 else None
        reports.append(
            ChunkReport(
                method=expected.method,
                budget=expected.budget,
                steps=expected.steps,
                actions=len(differences),
                worst_action=int(differences.argmax()) + 1,
                difference=worst,
                limit=limit,
                kept_alike=alike,
                passed=limit is None or worst <= limit,
            )
        )
        on_chunk()
    return reports


def chunk_differences(found: GateChunk, expected: GateChunk) -> Array:
    """Return [actions] fp64, the largest difference of a number of each action."""
    return np.abs(np.subtract(found.actions, expected.actions)).max(axis=1)


def kept_alike(found: GateAnswer | GateChunk, expected: GateAnswer | GateChunk) -> float:
    """Return the smallest share of equal kept tokens of all steps."""
    return min(len(set(own) & set(other)) / len(other) for own, other in zip(found.kept, expected.kept, strict=True))


def row_differences(kind: OutputKind, found: Array, expected: Array) -> Array:
    """Return [rows] fp64, the relative difference of each row; infinite if not finite or of another shape.

    Rows and values: the length of the difference, over the length of the expected row. Logits and actions, each a
    row: the length of the difference, over the root mean square of all lengths. Indices: [1], the number that differ.
    Attention's [1,H,S,h] has S rows.
    """
    if kind == "indices":
        alike = found.shape == expected.shape
        return np.array([(found != expected).sum() if alike else max(found.size, expected.size, 1)], np.float64)
    if found.shape != expected.shape or not (np.isfinite(found).all() and np.isfinite(expected).all()):
        return np.array([np.inf])
    exact = _rows(kind, expected)
    lengths = np.linalg.norm(exact, axis=-1)
    if not lengths.size:
        return lengths
    if kind in ("logits", "actions"):
        floor = np.full_like(lengths, np.sqrt(np.mean(np.square(lengths))))
    else:
        floor = np.maximum(lengths, _FLOOR * np.median(lengths))
    return np.linalg.norm(_rows(kind, found) - exact, axis=-1) / np.maximum(floor, np.finfo(np.float64).tiny)


def _rows(kind: OutputKind, array: Array) -> Array:
    """Return [rows,width] fp64."""
    exact = array.astype(np.float64)
    if kind not in ("rows", "actions"):
        return exact.reshape(-1, 1)
    if exact.ndim == 4:
        exact = exact.transpose(0, 2, 1, 3).reshape(-1, exact.shape[1] * exact.shape[3])
    return exact.reshape(-1, exact.shape[-1])


_RUNS = 8
_ROOM = 2
"""The engines of all graphs add rounding, and the noise is on one graph's outputs."""


def judged_by_noise(
    chunks: Sequence[ChunkReport], recording: Recording, rounding: Rounding, progress: BuildProgress
) -> list[ChunkReport]:
    """Return the reports, with a larger limit where noise changes the graphs' own chunk much.

    For each rejected chunk the graphs act again, with noise on the rows of the vision tower: as much as the median
    row of an engine of `rounding` may differ. The limit becomes twice the largest change of the chunk, if that is
    more. Runs that keep other tokens do not count. Without the files of the graphs nothing changes.
    """
    bundle, judged = recording.bundle, list(chunks)
    complete = all((bundle.path / spec.file).exists() for spec in bundle.manifest.graphs.values())
    rejected = [number for number, chunk in enumerate(chunks) if not chunk.passed]
    if not rejected or not complete:
        return judged
    wrap = _noisy_tower(bundle, limit_of("rows", rounding).typical)
    act = load_act(bundle, load_backend(REFERENCE, compute="fp32"), None, wrap)
    for place, number in enumerate(rejected):
        chunk, expected, changes = chunks[number], recording.chunks[number], [0.0]
        for run in range(_RUNS):
            progress.part("running the graphs with noise", place * _RUNS + run, _RUNS * len(rejected), "chunks")
            found = act(recording.question, chunk.method, chunk.budget)
            if kept_alike(found, expected) == 1:
                changes.append(float(chunk_differences(found, expected).max()))
        limit = max(chunk.limit or 0.0, float(f"{_ROOM * max(changes):.2g}"))
        judged[number] = replace(chunk, limit=limit, passed=chunk.difference <= limit)
    return judged


def _noisy_tower(bundle: Bundle, size: float) -> Wrap:
    """Return a wrap that multiplies the rows of the vision tower by `1 + size * normal`."""
    names = [tensor.name for tensor in bundle.manifest.graphs["vision"].outputs if kind_of(tensor) == "rows"]
    draw = np.random.default_rng(0)

    def wrap(graph: str, engine: Engine, backend: Backend) -> Engine:
        def noisy(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            outputs = dict(engine(inputs))
            for name in names:
                rows = backend.numpy(outputs[name])
                factors = 1 + size * draw.standard_normal(rows.shape)
                outputs[name] = backend.tensor((rows * factors).astype(rows.dtype))
            return outputs

        return noisy if is_tower(graph) else engine

    return wrap


def check_engines(
    built: BuiltEngines, own: BuiltEngines, backend: Backend, recording: Recording, progress: BuildProgress = SILENT
) -> GateReport:
    """Compare every engine of `built` on `backend` with `recording`, and then the answers or chunks of all engines.

    `built` are the engines with the bundle of their graphs. `own` are the engines with the files of the bundle in
    their own folder, which answer. Exceeded limits are in the report, not raised. Raises `BackendError` if an engine
    does not load or run, and what `Pipeline.generate` or `Policy.act` raises.
    """
    engines, manifest = built.engines, built.bundle.manifest
    graphs, texts, chunks = {}, list[TextReport](), list[ChunkReport]()
    for number, graph in enumerate(manifest.graphs):
        progress.graph(graph, number, len(manifest.graphs), "comparing engines")
        graphs[graph] = compare_engine(graph, built, backend, recording)
    if not any(report.refused for report in graphs.values()):
        texts, chunks = _compare_together(own, backend, recording, progress)
    return GateReport(
        bundle=str(built.bundle.path),
        engines=str(engines.path),
        target=engines.manifest.target,
        library_version=engines.manifest.library_version,
        backend=backend.name,
        compute=backend.compute,
        precision=manifest.precision,
        weights=manifest.weights,
        seen_share=recording.question.seen_shares(manifest),
        graphs=graphs,
        texts=texts,
        chunks=chunks,
        captured=backend.captured(),
        passed=bool(texts or chunks) and not refusals_together(texts, chunks, engines.manifest),
    )


def engines_alone(path: Path, trust: Trust = ANY) -> BuiltEngines:
    """Return the engines in the folder `path` with its files of the bundle. Raises what `read_runnable` does."""
    own = own_engines(read_runnable(path, trust))
    if own is None:
        raise EnginesError(f"'{path}' is a bundle, expected the folder of engines that was built from it.")
    return own


class Gate:
    """Rejects engines during a build if they differ from their graphs on a question."""

    def __init__(self, question: GateQuestion) -> None:
        self._question = question

    def flags(self, bundle: Bundle) -> dict[str, str]:
        """Return the flag for `engines.json`: the sum of the bundle and the question."""
        return {CHECKED: self._question.sha256(bundle)}

    def record_graphs(self, bundle: Bundle, target: Target, folder: Path, progress: BuildProgress) -> None:
        """Record the calls of all graphs of `bundle` in `folder`, before the first engine is built.

        Raises `BackendError` if this machine cannot run engines of `target`, and what `record` raises.
        """
        if target not in ANY_SHAPE:
            open_device()
        self._recording = record(bundle, self._question, folder, progress)

    def check_engine(self, graph: str, built: BuiltEngines) -> None:
        """Compare the new engine of `graph` with the recorded calls. Raises `EnginesError` if it differs."""
        backend = load_backend(backend_of(built.engines.manifest.target), None, built)
        report = compare_engine(graph, built, backend, self._recording)
        if report.refused is not None:
            raise EnginesError(refusal(graph, report, built.engines.manifest))

    def check_answers(self, root: Path, progress: BuildProgress = SILENT) -> None:
        """Compare the answers or chunks of all engines in the folder `root`. Raises `EnginesError` if they differ."""
        own = engines_alone(root)
        backend = load_backend(backend_of(own.engines.manifest.target), None, own)
        texts, chunks = _compare_together(own, backend, self._recording, progress)
        for refused in refusals_together(texts, chunks, own.engines.manifest):
            raise EnginesError(refused)


def _compare_together(
    own: BuiltEngines, backend: Backend, recording: Recording, progress: BuildProgress
) -> tuple[list[TextReport], list[ChunkReport]]:
    """Compare the answers of all engines, or a policy's chunks; one takes longer than to compare an engine."""
    manifest, done = own.bundle.manifest, 0
    rounding = max((rounding_of(graph, manifest, backend.compute) for graph in manifest.graphs), key=ROUNDINGS.index)
    total = len(recording.chunks) + sum(len(answer.token_ids) for answer in recording.answers)
    what, unit = ("comparing chunks", "chunks") if manifest.policy else ("comparing answers", "tokens")

    def count() -> None:
        nonlocal done
        done += 1
        progress.part(what, done, total, unit)

    progress.part(what, 0, total, unit)
    if manifest.policy is not None:
        chunks = compare_chunks(load_act(own.bundle, backend, own, None), recording, rounding, count)
        return [], judged_by_noise(chunks, recording, rounding, progress)
    pipeline = Pipeline(own.bundle, backend, own, fit=recording.question.fit)
    return compare_texts(pipeline, recording, rounding, count), []
