"""Compares engines with the graphs they were built from: all of a folder, or each one during a build."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from sinkprune.contract.bundle import Bundle, read_runnable
from sinkprune.contract.engines_manifest import ANY_SHAPE, CHECKED, Target
from sinkprune.contract.errors import EnginesError
from sinkprune.contract.files.trust import ANY, Trust
from sinkprune.engines.gate.comparing import compare_chunks, compare_engine, compare_texts
from sinkprune.engines.gate.limits import coarsest_rounding
from sinkprune.engines.gate.question import GateQuestion
from sinkprune.engines.gate.recording import Recording, record
from sinkprune.engines.gate.report import ChunkReport, GateReport, TextReport, refusal, refusals_together
from sinkprune.engines.gate.sensitive_chunks import judged_by_noise
from sinkprune.engines.progress import SILENT, BuildProgress
from sinkprune.runtime.backends import Backend, load_backend
from sinkprune.runtime.backends.compatibility import BuiltEngines, backend_of, own_engines
from sinkprune.runtime.device import open_device
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.policy import Policy


def check_engines(
    built: BuiltEngines,
    own: BuiltEngines,
    backend: Backend,
    question: GateQuestion,
    recording: Recording,
    progress: BuildProgress = SILENT,
) -> GateReport:
    """Compare every engine of `built` on `backend` with `recording`, and then the answers or chunks of all engines.

    `built` are the engines with the bundle of their graphs. `own` are the engines with the files of the bundle in
    their own folder, which answer. Exceeded limits are in the report, not raised. Raises `BackendError` if an engine
    does not load or run, and what `Pipeline.generate` or `Policy.act` raises.
    """
    engines, manifest = built.engines, built.bundle.manifest
    graphs, together = {}, _Together([], [])
    for number, graph in enumerate(manifest.graphs):
        progress.graph(graph, number, len(manifest.graphs), "comparing engines")
        graphs[graph] = compare_engine(graph, built, backend, recording)
    if not any(report.refused for report in graphs.values()):
        together = _compare_together(own, built.bundle, backend, question, recording, progress)
    return GateReport(
        bundle=str(built.bundle.path),
        engines=str(engines.path),
        target=engines.manifest.target,
        library_version=engines.manifest.library_version,
        backend=backend.name,
        compute=backend.compute,
        precision=manifest.precision,
        weights=manifest.weights,
        seen_share=question.seen_shares(manifest),
        graphs=graphs,
        texts=together.texts,
        chunks=together.chunks,
        passed=any(together) and not refusals_together(*together, engines.manifest),
    )


def engines_alone(path: Path, trust: Trust = ANY) -> BuiltEngines:
    """Return the engines in the folder `path` with its files of the bundle. Raises what `read_runnable` does."""
    own = own_engines(read_runnable(path, trust))
    if own is None:
        raise EnginesError(f"'{path}' is a bundle, expected the folder of engines that was built from it.")
    return own


class Gate:
    """Rejects engines during a build if they differ from their graphs on a question."""

    _recording: Recording
    _bundle: Bundle

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
        self._bundle, self._recording = bundle, record(bundle, self._question, folder, progress)

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
        together = _compare_together(own, self._bundle, backend, self._question, self._recording, progress)
        for refused in refusals_together(*together, own.engines.manifest):
            raise EnginesError(refused)


class _Together(NamedTuple):
    """What all engines together gave: answers, or a policy's chunks."""

    texts: list[TextReport]
    chunks: list[ChunkReport]


def _compare_together(
    own: BuiltEngines,
    bundle: Bundle,
    backend: Backend,
    question: GateQuestion,
    recording: Recording,
    progress: BuildProgress,
) -> _Together:
    """Compare answers or chunks, with progress of its own: one takes longer than the comparison of an engine."""
    manifest, done = own.bundle.manifest, 0
    rounding = coarsest_rounding(manifest, backend.compute)
    total = len(recording.chunks) + sum(len(answer.token_ids) for answer in recording.answers)
    what, unit = ("comparing chunks", "chunks") if manifest.policy else ("comparing answers", "tokens")

    def count() -> None:
        nonlocal done
        done += 1
        progress.part(what, done, total, unit)

    progress.part(what, 0, total, unit)
    if manifest.policy is not None:
        chunks = compare_chunks(Policy(own.bundle, backend, own), question, recording, rounding, count)
        return _Together([], judged_by_noise(chunks, recording, bundle, question, rounding, progress))
    pipeline = Pipeline(own.bundle, backend, own, fit=question.fit)
    return _Together(compare_texts(pipeline, question, recording, rounding, count), [])
