"""The report of `sinkprune-doctor` on this machine, or on a board elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from sinkprune.contract.bundle import Bundle, read_runnable
from sinkprune.contract.errors import UsageError
from sinkprune.contract.manifest import DialectName
from sinkprune.jetson.boards import Board, Boards, FactSource, JetPack
from sinkprune.jetson.findings import (
    Finding,
    board_dialect,
    board_dialect_findings,
    library_findings,
    machine_findings,
    model_findings,
    newest_dialect,
)
from sinkprune.jetson.fit import (
    BOARD_BACKEND,
    NEW_TOKENS,
    PROMPT_TOKENS,
    ModelFit,
    ModelState,
    TargetMachine,
    TextLengths,
    fit,
)
from sinkprune.jetson.host.machine import Machine
from sinkprune.jetson.next_steps import first_steps, next_steps, recommendations
from sinkprune.jetson.presets import preset_manifest, read_presets
from sinkprune.jetson.recommendation import Recommendation
from sinkprune.runtime.backends.compatibility import usual_backend
from sinkprune.runtime.backends.known import KNOWN, on_cpu


@dataclass(frozen=True)
class Query:
    """The request of a user."""

    models: tuple[str, ...]
    """Folders of bundles or engines, and names of presets; every preset if empty."""
    picture: tuple[int, int]
    """Width and height in pixels of the image in a request."""
    backend: str | None
    """The backend to use; None is TensorRT on a board, and an installed backend elsewhere."""


@dataclass(frozen=True)
class DoctorReport:
    """A machine or board, the models that fit it, and what to do next."""

    machine: Machine | None
    """None for a board elsewhere."""
    board: str | None
    """The board's name; None if the machine is no known board."""
    board_facts: Board | None
    sources: dict[str, FactSource]
    """The sources of the board's facts, by the names in `Board.sources`."""
    jetpack: JetPack | None
    """The facts about the installed JetPack."""
    backend: str
    usable_bytes: int | None
    """Memory for programs: what is free on this machine now, or about what a board leaves."""
    findings: tuple[Finding, ...]
    models: tuple[ModelFit, ...]
    overview: bool
    """Whether `models` are all presets, because the user named no model."""
    recommendations: tuple[Recommendation, ...]
    """How to run each model that can run."""
    first: tuple[str, ...]
    """What to do before any command can run; empty if nothing prevents one."""
    next: tuple[str, ...]
    """Commands to run next."""


def report_on_machine(machine: Machine, boards: Boards, query: Query) -> DoctorReport:
    """Return the report on this machine."""
    board = boards.board(machine.board) if machine.board else None
    jetpack = boards.jetpack(machine.jetpack.l4t) if machine.jetpack.l4t else None
    backend = query.backend or _backend(machine)
    timed = board if backend == BOARD_BACKEND else None
    target = TargetMachine(backend, machine.free_bytes or 0, timed, machine.disk_free_bytes)
    dialect = jetpack.dialect if jetpack else "opset20" if machine.chip else "opset24"
    if newest_dialect(backend, machine.python.version_of("onnxruntime")) == "opset20":
        dialect = "opset20"
    return _report(boards, query, target, dialect, machine.board, machine, jetpack)


def report_on_board(name: str, boards: Boards, query: Query) -> DoctorReport:
    """Return the report on a board elsewhere. Raises `UnknownBoardError`."""
    board = boards.board(name)
    backend = query.backend or BOARD_BACKEND
    target = TargetMachine(backend, boards.usable_bytes(board), board if backend == BOARD_BACKEND else None)
    return _report(boards, query, target, board_dialect(backend, board, boards.jetpacks), name)


def _report(
    boards: Boards,
    query: Query,
    target: TargetMachine,
    dialect: DialectName,
    name: str | None,
    machine: Machine | None = None,
    jetpack: JetPack | None = None,
) -> DoctorReport:
    models = tuple(_fit(model, dialect, target, query) for model in query.models or read_presets())
    findings = [*machine_findings(machine, boards)] if machine else []
    if query.models:
        # In an overview, a preset that is too large is no finding.
        onnxruntime = machine.python.version_of("onnxruntime") if machine else None
        findings += model_findings(models, jetpack, target.usable_bytes, onnxruntime)
        if machine:
            findings += library_findings(machine, models)
        elif name:
            findings += board_dialect_findings(models, boards.board(name), boards.jetpacks)
    # A finding that blocks none of these models stops nothing.
    findings = [replace(finding, stops=any(map(finding.blocks, models))) for finding in findings]
    recommended = recommendations(models, findings)
    facts = boards.board(name) if name else None
    used = {*facts.sources.values()} if facts else set()
    return DoctorReport(
        machine=machine,
        board=name,
        board_facts=facts,
        sources={key: source for key, source in boards.sources.items() if key in used},
        jetpack=jetpack,
        backend=target.backend,
        usable_bytes=target.usable_bytes or None,
        findings=tuple(findings),
        models=models,
        overview=not query.models,
        recommendations=tuple(recommended),
        first=tuple(first_steps(findings, recommended)),
        next=tuple(next_steps(models, recommended, findings, dialect)),
    )


def _backend(machine: Machine) -> str:
    if machine.chip:
        return BOARD_BACKEND
    imports = machine.python.imports
    # The quickest pair: OpenVINO for the tower, ONNX Runtime for the decoder.
    if imports("onnxruntime") and imports("openvino"):
        return "ort-cpu+openvino"
    return "openvino" if imports("openvino") else "ort-cpu"


def _fit(model: str, dialect: DialectName, target: TargetMachine, query: Query) -> ModelFit:
    """Return how a bundle, engines or a preset fits. A folder with the name of a preset comes first.

    Raises `BundleError`, `EnginesError` and `UsageError`.
    """
    presets = read_presets()
    if Path(model).exists():
        bundle = read_runnable(model)
        if bundle.manifest.policy is not None:
            raise UsageError(
                f"'{model}' is a robot policy (family '{bundle.manifest.family}'), and this report is about models "
                "that answer. Leave it out; sinkprune-profile measures it."
            )
        kind: ModelState = "engines" if bundle.engines else "bundle"
        return fit(model, kind, bundle.manifest, _own_target(model, bundle, target, query.backend), query.picture)
    if model not in presets:
        raise UsageError(
            f"'{model}' is no folder and no preset of a model that answers; presets: {', '.join(presets)}."
        )
    return fit(model, "preset", preset_manifest(model, presets[model], dialect), target, query.picture)


_BOARDS = "aarch64"
"""The architecture of all boards."""


def _own_target(model: str, bundle: Bundle, target: TargetMachine, wanted: str | None) -> TargetMachine:
    """Return the target for a bundle or for engines, which fix the backend.

    Raises `UsageError` for engines of another target than that of the `wanted` backend, and for engines of a GPU
    whose memory is unknown here.
    """
    if bundle.engines is None:
        return target
    backend, built = usual_backend(bundle), bundle.engines.manifest.target
    if wanted is not None and KNOWN[wanted].target != built:
        raise UsageError(
            f"the engines '{model}' were built for target {built}, and backend '{wanted}' takes target "
            f"{KNOWN[wanted].target}. Leave out --backend, or give the bundle."
        )
    if backend != target.backend and backend not in on_cpu():
        raise UsageError(
            f"the engines '{model}' are for {built}, and the memory of that GPU is unknown "
            "here. Run this on that machine, or add --board NAME."
        )
    built_for = bundle.engines.manifest.flags.get("machine")
    if target.board is not None and built_for not in (None, _BOARDS):
        raise UsageError(
            f"the engines '{model}' were built on {built_for}, and boards have {_BOARDS}. Build them on the board, "
            "or give the bundle."
        )
    enforced = bundle.engines.manifest.enforced_limits
    prompt, new = enforced.get("prompt_tokens"), enforced.get("new_tokens")
    text = TextLengths(
        min(PROMPT_TOKENS, prompt or PROMPT_TOKENS),
        min(NEW_TOKENS, new or NEW_TOKENS),
        prompt + new if prompt and new else None,
    )
    board = target.board if backend == target.backend else None
    return replace(target, backend=backend, board=board, text=text)
