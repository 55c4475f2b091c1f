"""Engines beside the graphs they were built of: all of a folder, or one after the other while they are built."""

from __future__ import annotations

from pathlib import Path

from sinkprune.contract.bundle import Bundle, read_runnable
from sinkprune.contract.engines_manifest import ANY_SHAPE, Target
from sinkprune.contract.errors import EnginesError
from sinkprune.contract.files.trust import ANY, Trust
from sinkprune.engines.gate.comparing import compare_engine, compare_texts
from sinkprune.engines.gate.limits import coarsest
from sinkprune.engines.gate.question import Question
from sinkprune.engines.gate.recording import Recording, record
from sinkprune.engines.gate.report import GateReport, refusal, text_refusal
from sinkprune.engines.progress import SILENT, BuildProgress
from sinkprune.runtime.backends import Backend, load_backend
from sinkprune.runtime.backends.compatibility import BuiltEngines, backend_of, own_engines
from sinkprune.runtime.device import open_device
from sinkprune.runtime.pipeline import Pipeline

CHECKED = "checked"
"""The flag in `engines.json` of engines that passed a gate."""


def check_engines(
    built: BuiltEngines,
    own: BuiltEngines,
    backend: Backend,
    question: Question,
    recording: Recording,
    progress: BuildProgress = SILENT,
) -> GateReport:
    """Every engine of `built` on `backend`, beside what `recording` has of its graph, and the answers of all.

    `built` has the engines with the bundle that holds their graphs, `own` with what came with them, by which they
    answer. Nothing is refused here: the report tells what is past its limits. Raises what loading, running and asking
    raise.
    """
    engines, manifest = built.engines, built.bundle.manifest
    graphs, texts = {}, []
    for number, graph in enumerate(manifest.graphs):
        progress.graph(graph, number, len(manifest.graphs) + 1)
        graphs[graph] = compare_engine(graph, built, backend, recording)
    if not any(report.refused for report in graphs.values()):
        progress.graph("answers", len(graphs), len(graphs) + 1)
        pipeline = Pipeline(own.bundle, backend, own)
        texts = compare_texts(pipeline, question, recording, coarsest(manifest, backend.compute))
    return GateReport(
        bundle=str(built.bundle.path),
        engines=str(engines.path),
        target=engines.manifest.target,
        library_version=engines.manifest.library_version,
        backend=backend.name,
        compute=backend.compute,
        precision=manifest.precision,
        weights=manifest.weights,
        graphs=graphs,
        texts=texts,
        passed=bool(texts) and all(text.passed for text in texts),
    )


def engines_alone(path: Path, trust: Trust = ANY) -> BuiltEngines:
    """The engines in the folder `path` with what came with them of their bundle; raises what `read_runnable` does."""
    own = own_engines(read_runnable(path, trust))
    if own is None:
        raise EnginesError(f"'{path}' is a bundle, expected the folder of engines that was built from it.")
    return own


class Gate:
    """What a build must pass. This one lets everything through."""

    def flags(self, bundle: Bundle) -> dict[str, str]:
        """What `engines.json` tells of it: engines that passed another gate, or none, are others."""
        return {}

    def prepare(self, bundle: Bundle, target: Target, place: Path, progress: BuildProgress) -> None:
        """Before the first engine is built: `bundle` has all its graphs. What is kept for later lies in `place`."""

    def engine(self, graph: str, built: BuiltEngines) -> None:
        """The engine of `graph`, one of those in `built`, was written; raises `EnginesError` for one to refuse."""

    def whole(self, root: Path) -> None:
        """All engines are in the folder `root`, and passed; raises `EnginesError` if they are refused together."""


OPEN = Gate()
"""Refuses nothing."""


class PictureGate(Gate):
    """Refuses engines that differ from their graphs on one picture."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._recording: Recording | None = None

    def flags(self, bundle: Bundle) -> dict[str, str]:
        """The picture and the question that engines were checked with, as a sha256."""
        return {CHECKED: self._question.sha256(bundle)}

    def prepare(self, bundle: Bundle, target: Target, place: Path, progress: BuildProgress) -> None:
        """Record what the graphs make of the picture.

        Raises `BackendError` where engines could not run here, and what `record` raises.
        """
        if target not in ANY_SHAPE:
            open_device()
        self._recording = record(bundle, self._question, place, progress)

    def engine(self, graph: str, built: BuiltEngines) -> None:
        """Compare an engine with what was recorded of its graph."""
        backend = load_backend(backend_of(built.engines.manifest.target), None, built)
        report = compare_engine(graph, built, backend, self._known)
        if report.refused is not None:
            raise EnginesError(refusal(graph, report, built.engines.manifest))

    def whole(self, root: Path) -> None:
        """Compare what all engines say together."""
        own = engines_alone(root)
        manifest = own.engines.manifest
        backend = load_backend(backend_of(manifest.target), None, own)
        rounding = coarsest(own.bundle.manifest, backend.compute)
        for text in compare_texts(Pipeline(own.bundle, backend, own), self._question, self._known, rounding):
            if not text.passed:
                raise EnginesError(text_refusal(text, manifest))

    @property
    def _known(self) -> Recording:
        assert self._recording is not None, "prepare comes first"
        return self._recording
