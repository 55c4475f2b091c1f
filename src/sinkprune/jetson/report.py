"""What `sinkprune-doctor` finds: on this machine, or of a board that is elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from sinkprune.contract.bundle import Bundle, read_runnable
from sinkprune.contract.errors import UsageError
from sinkprune.contract.manifest import DialectName
from sinkprune.jetson.boards import Board, Boards, JetPack, Source
from sinkprune.jetson.findings import Finding, machine_findings, model_findings
from sinkprune.jetson.fit import BOARD_BACKEND, Kind, ModelFit, Target, fit
from sinkprune.jetson.host.machine import Machine
from sinkprune.jetson.host.power_mode import ModeFacts, mode_facts
from sinkprune.jetson.next_steps import first_steps, next_steps, recommendations
from sinkprune.jetson.presets import preset_manifest, read_presets
from sinkprune.jetson.recommendation import Recommendation
from sinkprune.jetson.times import SHARES, Share
from sinkprune.runtime.backends.compatibility import usual_backend
from sinkprune.runtime.backends.known import ON_CPU


@dataclass(frozen=True)
class Asked:
    """What a user wants to know."""

    models: tuple[str, ...]
    """Folders of bundles and of engines, and names of presets; every preset where there is none."""
    picture: tuple[int, int]
    """Width and height in pixels of the image that is asked about."""
    backend: str | None
    """The library that is to run models; None is TensorRT on a board, else one that is installed."""


@dataclass(frozen=True)
class Report:
    """What was found."""

    machine: Machine | None
    """None for a board that is elsewhere."""
    board: str | None
    """The board's name; None where the machine is none that is known."""
    board_facts: Board | None
    sources: dict[str, Source]
    """Where the board's facts come from, by the names they use."""
    jetpack: JetPack | None
    """What is known of the JetPack that is installed."""
    backend: str
    usable_bytes: int | None
    """What a program may take of the memory: what is free here now, or about what a board leaves."""
    findings: tuple[Finding, ...]
    models: tuple[ModelFit, ...]
    overview: bool
    """Whether no model was named, and all presets are here."""
    power_modes: tuple[ModeFacts, ...]
    """The board's power modes; none where no board is known."""
    shares: dict[str, Share]
    """What the ranges of times are made of: the shares of a peak that were measured, by what they are of."""
    recommendations: tuple[Recommendation, ...]
    """What to run of each model that can run."""
    first: tuple[str, ...]
    """What to do before any command can run; empty where nothing stands in the way."""
    next: tuple[str, ...]
    """Commands to run next."""


def report_on_machine(machine: Machine, boards: Boards, asked: Asked) -> Report:
    """What `machine` is, and what fits it."""
    board = boards.board(machine.board) if machine.board else None
    jetpack = boards.jetpack(machine.jetpack.l4t) if machine.jetpack.l4t else None
    backend = asked.backend or _backend(machine)
    own = board if backend == BOARD_BACKEND else None
    target = Target(backend, machine.free_bytes or 0, own, machine.disk_free_bytes)
    dialect = jetpack.dialect if jetpack else "opset20" if machine.chip else "opset24"
    found = tuple(machine_findings(machine, boards))
    return _report(boards, asked, target, dialect, jetpack, machine, machine.board, found)


def report_on_board(name: str, boards: Boards, asked: Asked) -> Report:
    """What fits the board of that name, wherever it is; raises `UnknownBoardError`."""
    board = boards.board(name)
    backend = asked.backend or BOARD_BACKEND
    target = Target(backend, boards.usable_bytes(board), board if backend == BOARD_BACKEND else None)
    # What every TensorRT that its JetPacks bring along takes.
    dialect: DialectName = "opset20" if backend == BOARD_BACKEND else "opset24"
    return _report(boards, asked, target, dialect, None, None, name, ())


def _report(
    boards: Boards,
    asked: Asked,
    target: Target,
    dialect: DialectName,
    jetpack: JetPack | None,
    machine: Machine | None,
    name: str | None,
    found: tuple[Finding, ...],
) -> Report:
    models = tuple(_fit(model, dialect, target, asked.picture) for model in asked.models or tuple(read_presets()))
    # Where nothing was asked for, that some preset is too large is no finding.
    told = model_findings(models, jetpack, target.usable_bytes) if asked.models else ()
    findings = _stopping((*found, *told), models)
    recommended = recommendations(models, findings)
    facts = boards.board(name) if name else None
    used = {*facts.sources.values()} if facts else set()
    return Report(
        machine=machine,
        board=name,
        board_facts=facts,
        sources={key: source for key, source in boards.sources.items() if key in used},
        jetpack=jetpack,
        backend=target.backend,
        usable_bytes=target.usable_bytes or None,
        findings=findings,
        models=models,
        overview=not asked.models,
        power_modes=mode_facts(machine.power_mode if machine else None, facts.power_modes if facts else ()),
        shares=SHARES,
        recommendations=tuple(recommended),
        first=tuple(first_steps(findings, recommended)),
        next=tuple(next_steps(models, recommended, findings, dialect)),
    )


def _stopping(findings: tuple[Finding, ...], models: tuple[ModelFit, ...]) -> tuple[Finding, ...]:
    """Return the findings as far as they concern what was asked: one that blocks no model here stops nothing."""
    return tuple(replace(one, stops=any(one.blocks(model) for model in models)) for one in findings)


def _backend(machine: Machine) -> str:
    if machine.chip:
        return BOARD_BACKEND
    imports = machine.python.imports
    # With both, the first token comes soonest from OpenVINO's tower and each later one from ONNX Runtime's decoder.
    if imports("onnxruntime") and imports("openvino"):
        return "ort-cpu+openvino"
    return "openvino" if imports("openvino") else "ort-cpu"


def _fit(model: str, dialect: DialectName, target: Target, picture: tuple[int, int]) -> ModelFit:
    """A bundle or engines, or a preset where no folder is of its name.

    Raises `BundleError`, `EnginesError` and `UsageError`.
    """
    presets = read_presets()
    if Path(model).exists():
        bundle = read_runnable(model)
        kind: Kind = "engines" if bundle.engines else "bundle"
        return fit(model, kind, bundle.manifest, _own_target(model, bundle, target), picture)
    if model not in presets:
        raise UsageError(f"'{model}' is no folder and no preset; presets: {', '.join(presets)}.")
    return fit(model, "preset", preset_manifest(model, presets[model], dialect), target, picture)


def _own_target(model: str, bundle: Bundle, target: Target) -> Target:
    """What runs a bundle or its engines, which are for one library; raises `UsageError` for memory not known here."""
    if bundle.engines is None:
        return target
    backend = usual_backend(bundle)
    if backend != target.backend and backend not in ON_CPU:
        raise UsageError(
            f"the engines '{model}' are for {bundle.engines.manifest.target}, whose memory is a GPU's own unless it "
            "is a board's: run this there, or add --board NAME."
        )
    enforced = bundle.engines.manifest.enforced_limits
    both = {"prompt_tokens", "new_tokens"} <= set(enforced)
    most_text = enforced["prompt_tokens"] + enforced["new_tokens"] if both else None
    board = target.board if backend == target.backend else None
    return replace(target, backend=backend, board=board, most_text=most_text)
